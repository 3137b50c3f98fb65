"""Writes tokenizer.json and tokenizer_config.json from the vocabulary in a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from treadle_server.checkpoints.gguf_byte_level import build_byte_level, find_cut
from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.checkpoints.gguf_sentencepiece import build_sentencepiece
from treadle_server.checkpoints.gguf_vocabulary import SpecialIds, Vocabulary, read_vocabulary
from treadle_server.errors import UnsupportedModelError


def write_tokenizer(file: GgufFile, folder: Path) -> SpecialIds:
    """Write both files; raises UnsupportedModelError naming a vocabulary or pre-tokenizer that is not supported."""
    kind = file.require("tokenizer.ggml.model", str)
    vocabulary = read_vocabulary(file)
    ids = vocabulary.special_ids()
    tokenizer, add_bos = _build(kind, vocabulary)
    template = _post_processor(vocabulary, ids, add_bos=add_bos)
    if template is not None:
        tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(vocabulary, ids), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return ids


def _build(kind: str, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether a text begins with BOS when the file does not say."""
    if kind == "gpt2":
        return build_byte_level(vocabulary), find_cut(vocabulary).add_bos
    if kind == "llama":
        return build_sentencepiece(vocabulary), True
    raise UnsupportedModelError(
        f"{vocabulary.file.path}: vocabularies of the kind {kind!r} cannot be imported, byte-level BPE ('gpt2') and "
        "SentencePiece BPE ('llama') can; use the model's Hugging Face folder"
    )


def _post_processor(vocabulary: Vocabulary, ids: SpecialIds, *, add_bos: bool) -> processors.TemplateProcessing | None:
    file, tokens = vocabulary.file, vocabulary.tokens
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


def _tokenizer_config(vocabulary: Vocabulary, ids: SpecialIds) -> dict[str, Any]:
    file, tokens = vocabulary.file, vocabulary.tokens
    unknown = vocabulary.special_id("unknown")
    named = {
        "bos_token": ids.bos,
        "eos_token": ids.eos[0] if ids.eos else None,
        "unk_token": unknown,
        "pad_token": ids.pad,
    }
    config: dict[str, Any] = {key: tokens[token_id] for key, token_id in named.items() if token_id is not None}
    config |= {
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length", int),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = file.get("tokenizer.chat_template", str)
    return config if template is None else config | {"chat_template": template}
