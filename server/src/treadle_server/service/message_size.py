"""How much a message may hold. Its bytes are bounded; what Python makes of them is many times larger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from treadle_server.errors import InvalidRequestError

_SINGLE: Final = frozenset({int, str, bytes, float, bool})


def check_entries(message: Message, limit: int) -> None:
    """Refuse a message whose lists and maps have more than `limit` entries together, however they are nested.

    Numbers are counted by the list, so that a long prompt costs nothing; of messages within messages no more than
    `limit` are looked at.

    Raises:
        InvalidRequestError: names the field that goes past the limit.
    """
    num_entries = 0
    # Iterators, not lists: a million messages held at once would keep the garbage collector busy for a second.
    waiting: list[tuple[str, Iterator[Message]]] = [("", iter([message]))]
    while waiting:
        path, messages = waiting[-1]
        outer = next(messages, None)
        if outer is None:
            waiting.pop()
            continue
        for field, value in outer.ListFields():
            if type(value) in _SINGLE:  # first, as most are
                continue
            if isinstance(value, Message):
                waiting.append((f"{path}{field.name}.", iter([value])))
                continue
            num_entries += len(value)
            if num_entries > limit:
                problem = f"has {len(value)} entries; the lists of a request have at most {limit} together"
                raise InvalidRequestError.of(path + field.name, problem)
            waiting.append((f"{path}{field.name}.", iter(_messages(value))))


def _messages(entries: Sequence[Any] | Mapping[Any, Any]) -> Iterable[Message]:
    """Return the messages that a list or map holds."""
    inner: Iterable[Any] = entries.values() if isinstance(entries, Mapping) else entries
    # All entries of a field are of one type: the first tells whether there is anything to look into.
    return inner if isinstance(next(iter(inner), None), Message) else ()
