"""Trains two tiny SentencePiece vocabularies and writes down what SentencePiece itself makes of some texts.

Needs `pip install sentencepiece==0.2.3`. Run it from anywhere; it writes tokenizers/sentencepiece_*.json beside itself.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece

CORPUS = """the cat sat on the mat and the mouse ran under the house while a small dog barked at the moon ; def function
return value = 1 + 2 * 34 ; Der Käfer läuft über die Straße . Le café déjà vu est très bon . 数字 漢字 仮名 です ます"""
TEXTS = [
    "the cat sat", " the cat", "  two  spaces ", "", " ", "mouse", "un\n\nlines\tand tabs",
    "the<user>cat the <user> cat",
    "naïve façade 数字です", "emoji 🙂 and é́", "x▁y ▁▁ z", "    indented\n        more", "barkedbarkedbarked",
    "zzzzzz qqq", "1234 + 5678", "caféscafés über-Straße",
]  # fmt: skip
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"add_dummy_prefix": True, "byte_fallback": True, "vocab_size": 500},
    "gemma": {
        "add_dummy_prefix": False, "byte_fallback": True, "vocab_size": 520,
        "user_defined_symbols": ["<user>", "\n\n", "▁▁", "▁▁▁▁"],
    },
    "unknown": {"add_dummy_prefix": True, "byte_fallback": False, "vocab_size": 240},
}  # fmt: skip


def main() -> None:
    """Write one file a style."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(CORPUS.split(), k=12)) for _ in range(600)]
    for name, style in STYLES.items():
        buffer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=buffer, model_type="bpe", character_coverage=1.0,
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, **style,
        )  # fmt: skip
        write(Path(__file__).parent / "tokenizers" / f"sentencepiece_{name}.json", buffer.getvalue(), style, rng)


def write(path: Path, model: bytes, style: dict[str, Any], rng: random.Random) -> None:
    """Write the vocabulary as a GGUF file holds it, and each text with its ids and what they decode to."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.vocab_size()
    kinds = [kind(processor, i) for i in range(size)]
    pieces = [processor.id_to_piece(i) for i in range(size)]
    # llama.cpp's converter writes the user's own pieces with spaces.
    tokens = [piece.replace("▁", " ") if kinds[i] == 4 else piece for i, piece in enumerate(pieces)]
    texts = TEXTS + ["".join(rng.choices("theca moun  \n数é<>", k=rng.randint(1, 24))) for _ in range(60)]
    content = {
        "add_space_prefix": style["add_dummy_prefix"],
        "tokens": tokens,
        "scores": [processor.get_score(i) for i in range(size)],
        "types": kinds,
        "cases": [{"text": text, "ids": processor.encode(text), "decoded": decoded(processor, text)} for text in texts],
    }
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def kind(processor: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    """The GGUF token type."""
    if processor.is_unknown(token_id):
        return 2
    if processor.is_control(token_id):
        return 3
    if processor.is_byte(token_id):
        return 6
    return 4 if processor.id_to_piece(token_id) in STYLES["gemma"]["user_defined_symbols"] else 1


def decoded(processor: sentencepiece.SentencePieceProcessor, text: str) -> str:
    """What the ids of a text stand for."""
    return str(processor.decode(processor.encode(text)))


if __name__ == "__main__":
    main()
