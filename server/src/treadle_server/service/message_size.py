"""How much a message may hold. Its bytes are bounded; what Python makes of them is many times larger."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from treadle_server.errors import InvalidRequestError

_ENTRIES_A_MESSAGE: Final = 4
_FEW_MESSAGES: Final = 64
_SINGLE: Final = frozenset({int, str, bytes, float, bool})


def check_entries(message: Message, limit: int) -> None:
    """Refuse a message whose lists and maps have more than `limit` entries together, however they are nested.

    Numbers are counted by the list, so that a long prompt costs nothing. Of messages within messages there may be a
    quarter as many (of few, `limit` too): each costs far more than a number, and some of that holds all threads up.

    Raises:
        InvalidRequestError: names the field that goes past the limit.
    """
    num_entries = num_messages = 0
    message_limit = max(limit // _ENTRIES_A_MESSAGE, _FEW_MESSAGES)
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
            inner = _messages(value)
            num_messages += len(inner)
            if num_messages > message_limit:
                problem = f"has {len(inner)} entries; of its kind a request has at most {message_limit} together"
                raise InvalidRequestError.of(path + field.name, problem)
            waiting.append((f"{path}{field.name}.", iter(inner)))


def _messages(entries: Sequence[Any] | Mapping[Any, Any]) -> Collection[Message]:
    """Return the messages that a list or map holds."""
    inner: Collection[Any] = entries.values() if isinstance(entries, Mapping) else entries
    # All entries of a field are of one type: the first tells whether there is anything to look into.
    return inner if isinstance(next(iter(inner), None), Message) else ()
