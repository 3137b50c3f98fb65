"""How much text a single token can stand for, where that can be told from the tokenizer's parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from treadle_server.tokenizer import decoding

# NFC shortens UTF-8 to no less than 2/7: U+1FBE U+0308 U+0301 (7 bytes) is U+0390 (2 bytes).
_NFC_SHRINKAGE = 4
_NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


def normalizer_shrinkage(backend: tokenizers.Tokenizer) -> int:
    """Return how many times shorter, in bytes, the normalizer can make a text; 0 when that is unknown."""
    shrinkage = 1
    for spec in _parts(backend.normalizer, "normalizers"):
        match spec:
            case {"type": "NFC"}:
                shrinkage *= _NFC_SHRINKAGE
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return 0
    return shrinkage


def covers_all_text(backend: tokenizers.Tokenizer, tokens: Sequence[str | None]) -> bool:
    """Return whether every byte of a text ends up in a token that spells it: nothing is dropped or made unknown."""
    swallows = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if swallows or not isinstance(backend.model, tokenizers.models.BPE):
        return False
    pre_tokenizers = _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(map(_keeps_everything, pre_tokenizers)):
        return False
    if any(spec["type"] == "ByteLevel" for spec in pre_tokenizers):
        alphabet = {decoding.byte_level_bytes(token) for token in tokens if token and len(token) == 1}
    elif backend.model.byte_fallback:
        alphabet = {decoding.fallback_byte(token) or b"" for token in tokens if token}
    else:
        return False
    return all(bytes([byte]) in alphabet for byte in range(256) if byte not in _NEVER_IN_UTF8)


def _keeps_everything(spec: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer only splits."""
    match spec:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """Return the specifications of a normalizer or pre-tokenizer, sequences taken apart."""
    if component is None:
        return []
    todo, parts = [json.loads(component.__getstate__())], []
    while todo:
        spec = todo.pop(0)
        if spec["type"] == "Sequence":
            todo = spec[key] + todo
        else:
            parts.append(spec)
    return parts
