"""SentencePiece vocabularies in GGUF files give the ids that SentencePiece itself gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.checkpoints.gguf_tokenizer import write_tokenizer
from treadle_server.errors import CheckpointError, TreadleError, UnsupportedModelError
from treadle_server.tokenizer import Detokenizer
from treadle_server.tokenizer import Tokenizer as TreadleTokenizer

Import = Callable[..., Path]
STYLES = ["llama", "gemma", "unknown"]


def read_style(golden: Path, style: str) -> dict[str, Any]:
    """A vocabulary, and texts with the ids that SentencePiece gives."""
    content: dict[str, Any] = json.loads(
        (golden / "tokenizers" / f"sentencepiece_{style}.json").read_text(encoding="utf-8")
    )
    return content


@pytest.fixture
def import_style(golden: Path, tmp_path: Path) -> Import:
    """Imports a vocabulary, with changed metadata (None drops a key), and returns the folder."""

    def import_style(style: str, **changes: Any) -> Path:
        content = read_style(golden, style)
        metadata = {
            "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": content["tokens"], "tokenizer.ggml.scores": content["scores"],
            "tokenizer.ggml.token_type": content["types"], "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": content["add_space_prefix"],
        }  # fmt: skip
        changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        given = {key: value for key, value in changed.items() if value is not None}
        write_tokenizer(GgufFile(Path("tiny.gguf"), given, {}), tmp_path)
        return tmp_path

    return import_style


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_sentencepieces(import_style: Import, golden: Path, style: str) -> None:
    """Prefix, runs of spaces, bytes of rare letters, tokens of the user, unknown letters: every id is the same."""
    tokenizer = Tokenizer.from_file(str(import_style(style) / "tokenizer.json"))
    for case in read_style(golden, style)["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"], case["text"]


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_ids_come_back_as_the_text(import_style: Import, golden: Path, style: str) -> None:
    """Decoding is SentencePiece's, also a token at a time, with letters whose bytes are spread over tokens."""
    tokenizer = TreadleTokenizer.load(import_style(style))
    for case in read_style(golden, style)["cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join(detokenizer.push([token_id]) for token_id in case["ids"]) + detokenizer.flush()
        assert streamed == case["decoded"]


def test_a_text_begins_with_bos_unless_the_file_says_no(import_style: Import) -> None:
    """BOS comes first by custom, and EOS last where the file says so."""
    tokenizer = Tokenizer.from_file(str(import_style("llama") / "tokenizer.json"))
    assert tokenizer.encode("cat").ids[0] == 1
    both = Tokenizer.from_file(str(import_style("llama", add_bos_token=False, add_eos_token=True) / "tokenizer.json"))
    assert both.encode("cat").ids == [*both.encode("cat", add_special_tokens=False).ids, 2]


def test_a_space_goes_before_the_text_by_default(import_style: Import) -> None:
    """Files that do not say whether a space is put before the text mean that it is."""
    tokenizer = Tokenizer.from_file(str(import_style("llama", add_space_prefix=None) / "tokenizer.json"))
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["▁the"]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"scores": None}, CheckpointError, r"no tokenizer\.ggml\.scores"),
        ({"scores": [0.0]}, CheckpointError, "500 tokens but 1 scores"),
        ({"scores": [float("nan")] * 500}, CheckpointError, "finite numbers only"),
        ({"types": None, "token_type": [1] * 499 + [6]}, CheckpointError, "1 byte tokens, expected 256 or none"),
        ({"precompiled_charsmap": [1]}, UnsupportedModelError, "precompiled_charsmap is not supported"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "remove_extra_whitespaces is not supported"),
    ],
)
def test_what_would_give_wrong_ids_is_refused(
    import_style: Import, changes: dict[str, Any], error: type[TreadleError], match: str
) -> None:
    """Contradictions and normalisation that is not carried over are refused by name."""
    with pytest.raises(error, match=match):
        import_style("llama", **changes)


def test_unused_pieces_that_could_be_put_together_are_refused(import_style: Import, golden: Path) -> None:
    """SentencePiece takes such a piece apart again, which a tokenizer.json cannot say."""
    content = read_style(golden, "llama")
    kinds = [5 if token == "▁the" else kind for token, kind in zip(content["tokens"], content["types"], strict=True)]
    with pytest.raises(UnsupportedModelError, match="unused piece '▁the'"):
        import_style("llama", token_type=kinds)
