"""Writes tokenizer.json and tokenizer_config.json from the vocabulary in a GGUF file.

Byte-level BPE only. GGUF names the way text is cut before the merges by a word (`tokenizer.ggml.pre`); the table below
gives each word the pre-tokenizer of the models it stands for, and a word outside it is refused: a near miss would give
wrong ids without a sign.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.errors import CheckpointError, UnsupportedModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How text is cut into words before the merges.

    Attributes:
        patterns: each cuts the pieces of the one before; without any, GPT-2's pattern does.
        single_digits: whether every digit is a word first.
        normalize: whether text is brought to Unicode's NFC.
        ignore_merges: whether a word that is a token is one, whatever the merges say.
        add_bos: what holds when the file does not say whether a text begins with BOS.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    normalize: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CUTS = {
    "gpt-2": _Cut(),
    "olmo": _Cut(),
    "smollm": _Cut(single_digits=True),
    "starcoder": _Cut(single_digits=True),
    "refact": _Cut(single_digits=True),
    "llama-bpe": _Cut(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": _Cut(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": _Cut(patterns=(_QWEN2,), normalize=True),
    "deepseek-r1-qwen": _Cut(patterns=(_QWEN2,), normalize=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """The ids that config.json and generation_config.json name; `eos` holds every token that ends a turn."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def write_tokenizer(file: GgufFile, folder: Path) -> SpecialIds:
    """Write both files; raises UnsupportedModelError naming a vocabulary or pre-tokenizer that is not supported."""
    model = file.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{file.path}: vocabularies of the kind {model!r} cannot be imported yet, byte-level BPE ('gpt2') can; "
            "use the model's Hugging Face folder"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    ids = _special_ids(file, len(tokens))
    _build_tokenizer(file, tokens, ids).save(str(folder / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(file, tokens, ids), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return ids


def _special_ids(file: GgufFile, num_tokens: int) -> SpecialIds:
    ends = [_special_id(file, kind, num_tokens) for kind in ("eos", "eot", "eom")]
    return SpecialIds(
        bos=_special_id(file, "bos", num_tokens),
        eos=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad=_special_id(file, "padding", num_tokens),
    )


def _special_id(file: GgufFile, kind: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = file.get(key, int)
    if value is not None and not 0 <= value < num_tokens:
        raise CheckpointError(f"{file.path}: {key} must be under the vocabulary's {num_tokens} tokens, is {value}")
    return value


def _build_tokenizer(file: GgufFile, tokens: Sequence[str], ids: SpecialIds) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str)
    cut = None if pre is None else _CUTS.get(pre)
    if cut is None:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; supported are {', '.join(sorted(_CUTS))}"
        )
    kinds = _token_kinds(file, tokens)
    tokenizer = Tokenizer(_bpe(file, _vocabulary(file, tokens, kinds), cut))
    tokenizer.normalizer = normalizers.NFC() if cut.normalize else None
    tokenizer.pre_tokenizer = _pre_tokenizer(cut)
    tokenizer.decoder = decoders.ByteLevel()
    template = _post_processor(file, tokens, ids, add_bos=cut.add_bos)
    if template is not None:
        tokenizer.post_processor = template
    tokenizer.add_tokens(
        [_added_token(token, kind) for token, kind in zip(tokens, kinds, strict=True) if _is_added(kind)]
    )
    return tokenizer


def _token_kinds(file: GgufFile, tokens: Sequence[str]) -> Sequence[int]:
    kinds = file.get("tokenizer.ggml.token_type", list)
    if kinds is None:
        return [int(TokenType.NORMAL)] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return kinds


def _is_added(kind: int) -> bool:
    return kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


def _added_token(token: str, kind: int) -> AddedToken:
    return AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)


def _vocabulary(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Every token but the fillers for rows past the tokenizer's size; added ones too, so that they keep their ids."""
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == TokenType.UNUSED and token == f"[PAD{token_id}]":
            continue
        if token in vocabulary:
            raise CheckpointError(f"{file.path}: the tokens {vocabulary[token]} and {token_id} are both {token!r}")
        vocabulary[token] = token_id
    return vocabulary


def _bpe(file: GgufFile, vocabulary: dict[str, int], cut: _Cut) -> models.BPE:
    try:
        merges = [_pair(merge) for merge in _strings(file, "tokenizer.ggml.merges")]
        return models.BPE(vocabulary, merges, ignore_merges=cut.ignore_merges)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{file.path}: the vocabulary and its merges do not fit together: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.require(key, list)
    if not all(type(value) is str for value in values):
        raise CheckpointError(f"{file.path}: {key} must hold strings only")
    return values


def _pre_tokenizer(cut: _Cut) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _post_processor(
    file: GgufFile, tokens: Sequence[str], ids: SpecialIds, *, add_bos: bool
) -> processors.TemplateProcessing | None:
    stated = file.get("tokenizer.ggml.add_bos_token", bool)
    before = [ids.bos] if ids.bos is not None and (add_bos if stated is None else stated) else []
    after = [ids.eos[0]] if ids.eos and file.get("tokenizer.ggml.add_eos_token", bool) else []
    if not before and not after:
        return None
    words = {token_id: tokens[token_id] for token_id in before + after}
    single = [*(words[i] for i in before), "$A", *(words[i] for i in after)]
    pair = [*single, *(f"{words[i]}:1" for i in before), "$B:1", *(f"{words[i]}:1" for i in after)]
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(word, i) for i, word in words.items()]
    )


def _tokenizer_config(file: GgufFile, tokens: Sequence[str], ids: SpecialIds) -> dict[str, Any]:
    unknown = _special_id(file, "unknown", len(tokens))
    named = {
        "bos_token": ids.bos,
        "eos_token": ids.eos[0] if ids.eos else None,
        "unk_token": unknown,
        "pad_token": ids.pad,
    }
    config: dict[str, Any] = {key: tokens[token_id] for key, token_id in named.items() if token_id is not None}
    config |= {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length", int),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = file.get("tokenizer.chat_template", str)
    return config if template is None else config | {"chat_template": template}
