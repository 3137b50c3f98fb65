"""Small tokenizers of every kind in use, built with the library that trains real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from treadle_server import tokenizer as treadle

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "the quick brown fox jumps over the lazy dog , is it not ?",
    "she doesn't know that they've gone ! we're  here .",
    "안녕하세요 세계, 猫 追 老鼠 我 爱 你好世界 🙂",
    "def main ( x ) : return x + 1",
] * 8


def bpe(**settings: Any) -> Tokenizer:
    """An empty BPE model in a tokenizer."""
    return Tokenizer(models.BPE(**settings))


def train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    """Train on the small corpus."""
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(*, strip: bool) -> Tokenizer:
    """Llama 2 with `strip`, Gemma without: BPE over the whole text, U+2581 for spaces, bytes for unknown characters."""
    tokenizer = bpe(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    special = ["<unk>", "<s>", "</s>"]
    train(tokenizer, trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *BYTE_TOKENS], show_progress=False))
    # Byte tokens are ordinary tokens of the model, not special ones: rebuild without that mark.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    bos = [("<s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    return tokenizer


def unigram() -> Tokenizer:
    """T5 and XLM-R: Unigram with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return train(tokenizer, trainer)


def word_piece(*, cleanup: bool = True) -> Tokenizer:
    """BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return train(
        tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    )


def word_level() -> Tokenizer:
    """Six words joined by spaces; no decoder at all."""
    words = ["猫", "追", "老鼠", "我", "爱", "<PAD>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<PAD>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<PAD>"])
    return tokenizer


def end_of_word() -> Tokenizer:
    """GPT-1: a mark at the end of each word."""
    tokenizer = bpe(unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    return train(tokenizer, trainer)


def text_decoders() -> Tokenizer:
    """Decoders that work on the joined text: one that can stream, and one (a pattern) that cannot."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([*text_steps(), decoders.Replace(Regex("[0-9]+"), "#"), decoders.Fuse()])
    return tokenizer


def replaced_text() -> Tokenizer:
    """The streaming half of `text_decoders` alone."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(text_steps())
    return tokenizer


def text_steps() -> list[Any]:
    """A byte-level decoder, and others that work on the text it makes."""
    return [decoders.ByteLevel(), decoders.Replace("aa", "b"), decoders.Strip(" ", 2, 0)]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: bytes written as characters. One added token has a space and an accent in it."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / "byte_level.json"))
    tokenizer.add_tokens(["née Ω"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": lambda: sentencepiece(strip=True),
    "gemma": lambda: sentencepiece(strip=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "word_level": word_level,
    "end_of_word": end_of_word,
    "replaced_text": replaced_text,
    "text_decoders": text_decoders,
    "clean_up": lambda: word_piece(cleanup=False),
}


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, treadle.Tokenizer]:
    """One tokenizer of each kind."""
    settings = {"clean_up": {"clean_up_tokenization_spaces": True}}
    return {kind: treadle.Tokenizer(make(), settings.get(kind)) for kind, make in KINDS.items()}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, treadle.Tokenizer]) -> treadle.Tokenizer:
    """Each kind of tokenizer in turn."""
    return tokenizers_by_kind[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that holds a tokenizer.json and nothing else."""
    shutil.copy(GOLDEN / "byte_level.json", tmp_path / "tokenizer.json")
    return tmp_path
