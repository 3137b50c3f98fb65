"""Sequence numbers: which call was the last, and what the newest ones were answered.

The count is kept in a checkpoint, in two files beside its weights:

    trainer_calls.json      format, next_sequence_number
    trainer_answers.json    the remembered answers: number, fingerprint of the request, the response in base64
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from treadle_server.checkpoints.config_file import read_json_object
from treadle_server.errors import CheckpointError, SequenceNumberError

CALLS_NAME, ANSWERS_NAME = "trainer_calls.json", "trainer_answers.json"
_FORMAT = 1
# A client sends its last call again, or the few that it had under way.
_MAX_ANSWERS = 64
_MAX_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What a numbered call was answered: a fingerprint of its request, and the serialised response."""

    request: str
    response: bytes


class CallLog:
    """Counts the calls that changed something, from 1, and remembers the newest answers. Belongs to one thread."""

    def __init__(self, next_number: int = 1, answers: Mapping[int, Answer] | None = None) -> None:
        self.next_number = next_number
        self._answers = OrderedDict(answers or {})

    def answer_to(self, request: Message) -> bytes | None:
        """Return the first answer to a call that was done before, None for one that is new or has no number.

        Raises:
            SequenceNumberError: the number is not the next one, or it was another request's.
        """
        number = number_of(request)
        if number is None or number == self.next_number:
            return None
        known = self._answers.get(number)
        if known is not None and known.request == _fingerprint(request):
            return known.response
        if known is not None:
            reason = "was another request's"
        elif number < self.next_number:
            reason = "was done, but its answer is not kept any more"
        else:
            reason = "skips calls that were not done"
        raise SequenceNumberError(f"sequence_number {number} {reason}; the next call has {self.next_number}")

    def after(self, request: Message, response: Message) -> CallLog:
        """Return the log as it is when a call has been answered; the same where the call has no number."""
        number = number_of(request)
        if number is None:
            return self
        answers = OrderedDict(self._answers)
        answers[number] = Answer(_fingerprint(request), response.SerializeToString())
        total = sum(len(answer.response) for answer in answers.values())
        while len(answers) > 1 and (len(answers) > _MAX_ANSWERS or total > _MAX_ANSWER_BYTES):
            total -= len(answers.popitem(last=False)[1].response)
        return CallLog(number + 1, answers)

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that hold the log, by name."""
        answers = [
            {"number": number, "request": answer.request, "response": base64.b64encode(answer.response).decode()}
            for number, answer in self._answers.items()
        ]
        return {
            CALLS_NAME: _json({"format": _FORMAT, "next_sequence_number": self.next_number}),
            ANSWERS_NAME: _json({"format": _FORMAT, "answers": answers}),
        }


def read_calls(folder: Path) -> CallLog:
    """Return the log of a checkpoint; a new one where there is none, as in what a trainer saved in process.

    Raises:
        CheckpointError: the files are broken.
    """
    if not (folder / CALLS_NAME).is_file():
        return CallLog()
    entries: Any = read_json_object(folder / ANSWERS_NAME).get("answers")
    try:
        answers = {int(entry["number"]): _read_answer(entry) for entry in entries}
    except (TypeError, KeyError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{folder / ANSWERS_NAME}: the remembered answers are broken: {error}") from error
    return CallLog(read_next_number(folder), answers)


def read_next_number(folder: Path) -> int:
    """Return the number of the first call after a checkpoint; raises CheckpointError where the file is broken."""
    path = folder / CALLS_NAME
    if not path.is_file():
        return 1
    settings = read_json_object(path)
    number = settings.get("next_sequence_number")
    if settings.get("format") != _FORMAT or not isinstance(number, int) or number < 1:
        raise CheckpointError(f"{path}: must have format {_FORMAT} and next_sequence_number, but is {settings!r:.200}")
    return number


def number_of(request: Any) -> int | None:
    """Return a request's sequence number; None where it has none."""
    return int(request.sequence_number) if request.HasField("sequence_number") else None


def _fingerprint(request: Message) -> str:
    """Return what tells requests apart, whatever their numbers."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("sequence_number")
    content = bare.SerializeToString(deterministic=True)
    return hashlib.sha256(bare.DESCRIPTOR.full_name.encode() + b"\0" + content).hexdigest()


def _read_answer(entry: Mapping[str, str]) -> Answer:
    return Answer(str(entry["request"]), base64.b64decode(entry["response"], validate=True))


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
