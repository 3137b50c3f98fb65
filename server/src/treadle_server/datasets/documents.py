"""A document of training data, and what a file of them can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_server.errors import DataError

MESSAGES_FIELD = "messages"


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a conversation, or a piece of a long text.

    Attributes:
        origin: where it comes from, for messages: the file and the line, row or byte.
        text: the text; empty when there are messages.
        messages: a conversation, each message with a role and a content.
        starts: whether the text begins here, and is no later piece.
        ends: whether it ends here.
    """

    origin: str
    text: str = ""
    messages: Sequence[Mapping[str, str]] | None = None
    starts: bool = True
    ends: bool = True


class Source(Protocol):
    """A file of documents, any of which can be read at any time."""

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A number for each document, `[documents] int64`, rising; those that can only be read together share one."""
        ...

    def read(self, index: int) -> Document:
        """Return a document; raises DataError when the file is not as it was any more."""
        ...


def record_document(origin: str, record: Any, field: str) -> Document:
    """Return the document in a JSON object or a table's row: its text, or else its messages. Raises DataError."""
    if not isinstance(record, Mapping):
        raise DataError(f"{origin}: must be an object with a {field!r}, but is {type(record).__name__}")
    if field in record and field != MESSAGES_FIELD:
        text = record[field]
        if not isinstance(text, str):
            raise DataError(f"{origin}: {field!r} must be a text, but is {type(text).__name__}")
        _check_unicode(f"{origin}: {field!r}", text)
        return Document(origin, text)
    if MESSAGES_FIELD in record:
        return Document(origin, messages=_messages(origin, record[MESSAGES_FIELD]))
    keys = ", ".join(map(repr, record)) or "none"
    raise DataError(f"{origin}: must have a {field!r} or {MESSAGES_FIELD!r}, but has {keys:.200}")


def _messages(origin: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{origin}: {MESSAGES_FIELD!r} must be a list of one message at least, but is {value!r:.80}")
    for number, message in enumerate(value):
        for key in ("role", "content"):
            found = message.get(key) if isinstance(message, Mapping) else None
            place = f"{origin}: {MESSAGES_FIELD}[{number}].{key}"
            if not isinstance(found, str):
                raise DataError(f"{place} must be a text, but is {type(found).__name__}")
            _check_unicode(place, found)
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _check_unicode(place: str, text: str) -> None:
    """Raise DataError for half of a surrogate pair: JSON's escapes can write one, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise DataError(f"{place} must be Unicode, but has the lone surrogate {half!r} at {error.start}") from error
