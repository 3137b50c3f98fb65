"""The rows of a request, tokenised, checked, and cut into the documents that a trainer takes as rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_protos.v1 import training_pb2 as pb

from treadle_server.errors import ChatTemplateError, InvalidRequestError
from treadle_server.tokenizer import Tokenizer
from treadle_server.training.batches import sound_numbers

_IGNORED = -100
_LISTS = ("labels", "weights", "logprobs", "advantages")
_POLICY_LISTS = ("logprobs", "advantages")
# What an answer takes a label: a double, and the token itself where the row was a text.
_BYTES_PER_TOKEN = 8 + 4
Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked batch, one entry a document in the lists, as `Trainer.forward_backward` takes them.

    Attributes:
        lists: `input_ids`, `labels` and, where given, `weights`, `logprobs`, `advantages`.
        num_documents: of each row of the request.
        encoded: the tokens of each row that came as a text; empty for others.
    """

    lists: dict[str, list[Numbers]] = field(default_factory=dict)
    num_documents: list[int] = field(default_factory=list)
    encoded: list[list[int]] = field(default_factory=list)


class RowReader:
    """Makes rows of messages; any thread may use it.

    Args:
        tokenizer: of the model; None where it has none, so that texts are refused.
        eos_token_id: what `append_eos` appends; None where the model has none.
        vocab_size: number of tokens of the model.
        max_document_tokens: largest document; None where the model has no limit.
        max_answer_bytes: largest answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        eos_token_id: int | None,
        vocab_size: int,
        max_document_tokens: int | None,
        max_answer_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._vocab_size = vocab_size
        self._max_document_tokens = max_document_tokens
        self._max_tokens = max_answer_bytes // _BYTES_PER_TOKEN

    def read(self, batch: pb.TrainingBatch) -> Rows:
        """Return a batch's rows; raises InvalidRequestError naming the field."""
        if not batch.rows:
            raise InvalidRequestError.of("batch.rows", "must have one row at least")
        rows = Rows()
        wanted = _wanted_lists(batch)
        num_tokens = 0
        for index, row in enumerate(batch.rows):
            num_tokens += self._add(rows, row, wanted, f"batch.rows[{index}]")
            if num_tokens > self._max_tokens:
                raise InvalidRequestError.of("batch.rows", f"must have at most {self._max_tokens} tokens together")
        return rows

    def _add(self, rows: Rows, row: pb.TrainingRow, wanted: Sequence[str], path: str) -> int:
        """Add a row's documents; return its length."""
        kind = row.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError.of(f"{path}.input", "must be set, one of: text, messages, token_ids")
        if kind != "token_ids":
            _refuse_lists(row, path)
        elif row.append_eos:
            raise InvalidRequestError.of(f"{path}.append_eos", "goes with a text; token_ids are taken as they are")
        ids = np.array(row.token_ids.ids if kind == "token_ids" else self._encode(row, path), np.int64)
        if not ids.size:
            raise InvalidRequestError.of(f"{path}.{kind}", "must have one token at least")
        _check_ids(f"{path}.{kind}", ids, self._vocab_size)
        starts = self._document_starts(row, ids.size, path)
        columns = {"input_ids": ids} | {name: self._column(row, name, ids, path) for name in wanted}
        for name, column in columns.items():
            rows.lists.setdefault(name, []).extend(np.split(column, starts))
        rows.num_documents.append(len(starts) + 1)
        rows.encoded.append([] if kind == "token_ids" else ids.tolist())
        return int(ids.size)

    def _encode(self, row: pb.TrainingRow, path: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError.of(path, "must be token_ids: the model has no tokenizer")
        if row.WhichOneof("input") == "text":
            ids = self._tokenizer.encode(row.text)
        else:
            messages = [{"role": m.role, "content": m.content} for m in row.messages.messages]
            if not messages:
                raise InvalidRequestError.of(f"{path}.messages", "must have at least one message")
            try:
                ids = self._tokenizer.encode_chat(messages, add_generation_prompt=False)
            except ChatTemplateError as error:
                raise InvalidRequestError.of(f"{path}.messages", str(error)) from error
        if not row.append_eos:
            return ids
        if self._eos_token_id is None:
            raise InvalidRequestError.of(f"{path}.append_eos", "must be false: the model has no end-of-sequence token")
        return [*ids, self._eos_token_id]

    def _document_starts(self, row: pb.TrainingRow, num_tokens: int, path: str) -> list[int]:
        """Return where documents begin but the first."""
        lengths = list(row.document_lengths) or [num_tokens]
        if min(lengths) < 1 or sum(lengths) != num_tokens:
            raise InvalidRequestError.of(
                f"{path}.document_lengths",
                f"must be 1 or more each and sum to the row's {num_tokens} tokens, but sum to {sum(lengths)}",
            )
        longest = max(lengths)
        if self._max_document_tokens is not None and longest > self._max_document_tokens:
            limit = f"must have documents of at most {self._max_document_tokens} tokens, but one has {longest}"
            raise InvalidRequestError.of(path, limit)
        return [int(start) for start in np.cumsum(lengths)[:-1]]

    def _column(self, row: pb.TrainingRow, name: str, ids: Numbers, path: str) -> Numbers:
        """Return one of a row's lists, checked; where it is empty, what stands for it."""
        values, place = getattr(row, name), f"{path}.{name}"
        if not values:
            if name in _POLICY_LISTS:
                raise InvalidRequestError.of(place, "must be given in every row of the batch, or in none")
            return ids if name == "labels" else np.ones(ids.size)
        if len(values) != ids.size:
            message = f"must have one number for each of the row's {ids.size} tokens, but has {len(values)}"
            raise InvalidRequestError.of(place, message)
        column = np.array(values, np.int64 if name == "labels" else np.float64)
        if name == "labels":
            _check_ids(place, column, self._vocab_size, _IGNORED)
        else:
            _check(place, column, *sound_numbers(name, column))
        return column


def _wanted_lists(batch: pb.TrainingBatch) -> list[str]:
    """Return the lists that one row at least has; labels are always given."""
    return ["labels", *(name for name in _LISTS[1:] if any(len(getattr(row, name)) for row in batch.rows))]


def _refuse_lists(row: pb.TrainingRow, path: str) -> None:
    for name in ("document_lengths", *_LISTS):
        if len(getattr(row, name)):
            raise InvalidRequestError.of(f"{path}.{name}", "goes with token_ids only: a text's tokens are not known")


def _check_ids(path: str, ids: Numbers, vocab_size: int, also: int | None = None) -> None:
    allowed = f"0 to {vocab_size - 1}" + ("" if also is None else f", or {also} for none")
    _check(path, ids, ((ids >= 0) & (ids < vocab_size)) | (ids == also), allowed)


def _check(path: str, values: Numbers, fine: Numbers, allowed: str) -> None:
    wrong = np.flatnonzero(~fine)
    if len(wrong):
        raise InvalidRequestError.of(f"{path}[{wrong[0]}]", f"must be {allowed}, but is {values[wrong[0]]}")
