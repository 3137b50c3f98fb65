"""Documents to token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from treadle_server.datasets import DocumentEncoder
from treadle_server.datasets.documents import Document
from treadle_server.errors import DataError
from treadle_server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    """The tiny model's tokenizer: BOS is 1, EOS is 2."""
    return Tokenizer.load(tiny_folder)


def test_a_text_ends_with_the_end_token(tokenizer: Tokenizer) -> None:
    """The model learns to end: the ids are those of a prompt, then EOS."""
    ids = DocumentEncoder(tokenizer).encode(Document("here", "the cat"))
    assert ids == [*tokenizer.encode("the cat"), 2]


def test_pieces_are_encoded_as_what_they_are(tokenizer: Tokenizer) -> None:
    """Only the first piece of a text gets what stands before one, only the last the end."""
    encoder = DocumentEncoder(tokenizer)
    first = encoder.encode(Document("here", "the", ends=False))
    last = encoder.encode(Document("here", " cat", starts=False))
    assert first == tokenizer.encode("the")
    assert last == [*tokenizer.encode(" cat", add_special_tokens=False), 2]


def test_a_conversation_goes_through_the_template(tokenizer: Tokenizer) -> None:
    """Messages are rendered with the chat template, without the start of a further answer."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    ids = DocumentEncoder(tokenizer).encode(Document("here", messages=messages))
    assert ids == tokenizer.encode_chat(messages, add_generation_prompt=False)


def test_what_cannot_be_encoded_is_named(tokenizer: Tokenizer) -> None:
    """A text that is no Unicode is refused with its place."""
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*lone surrogate"):
        DocumentEncoder(tokenizer).encode(Document("a.jsonl, line 3", "\ud800"))
