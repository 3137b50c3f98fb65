"""Ragged training batches: what a caller gives, checked, flattened, and shifted by one.

Every row is a sequence of its own: no token attends to another row's. Labels stand where their tokens stand; the row's
token t - 1 predicts label t, so a row's first label is predicted by nothing and never counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Adapter, Batch
from treadle_plugin_api.loss import Targets

from treadle_server.errors import InvalidRequestError

IGNORED = -100
# Further apart, float32 has no room for the gradients of their labels and for 1 over the sum of the weights.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e12
Rows = Sequence[Sequence[int]] | Sequence[NDArray[np.int64]] | NDArray[np.int64]
FloatRows = Sequence[Sequence[float]] | NDArray[np.float64] | Sequence[NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A checked batch.

    Attributes:
        batch: the sequences, flat.
        predicting: `[rows] int64`, the tokens of the flat batch that predict a counted label.
        targets: of those rows.
    """

    batch: Batch
    predicting: NDArray[np.int64]
    targets: Targets

    def logprobs_by_row(self, logprobs: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Lay logprobs `[rows]` out as the labels were; 0 where none was counted."""
        flat = np.zeros(self.batch.num_tokens)
        flat[self.predicting + 1] = logprobs
        return np.split(flat, self.batch.starts[1:-1])

    def split(self, num_parts: int) -> list[TrainingBatch]:
        """Return parts of whole sequences, of about as many tokens each: num_parts at most."""
        starts, num_tokens = self.batch.starts, self.batch.num_tokens
        cuts = np.searchsorted(starts, np.arange(1, num_parts) * num_tokens / num_parts).tolist()
        edges = sorted({0, *cuts, self.batch.num_sequences})
        return [self._sequences(first, stop) for first, stop in pairwise(edges)]

    def _sequences(self, first: int, stop: int) -> TrainingBatch:
        start, end = self.batch.starts[[first, stop]].tolist()
        rows = slice(*np.searchsorted(self.predicting, [start, end]).tolist())
        adapters = self.batch.adapters
        batch = replace(
            self.batch,
            token_ids=self.batch.token_ids[start:end],
            starts=self.batch.starts[first : stop + 1] - start,
            prefix_lengths=self.batch.prefix_lengths[first:stop],
            adapters=None if adapters is None else adapters[first:stop],
        )
        return TrainingBatch(batch, self.predicting[rows] - start, self.targets.rows(rows))


def make_batch(
    input_ids: Rows,
    labels: Rows | None,
    vocab_size: int,
    weights: FloatRows | None = None,
    logprobs: FloatRows | None = None,
    advantages: FloatRows | None = None,
    adapter: Adapter | None = None,
) -> TrainingBatch:
    """Check and flatten a batch; without labels every token is one. Raises InvalidRequestError naming the field.

    All rows go through `adapter` if there is one.
    """
    ids = _int_rows("input_ids", input_ids)
    lengths = [len(row) for row in ids]
    if not ids or min(lengths) == 0:
        raise InvalidRequestError.of("input_ids", f"must be rows of one token id at least, but has lengths {lengths}")
    _check_range("input_ids", ids, vocab_size)
    wanted = ids if labels is None else _int_rows("labels", labels)
    _check_lengths("labels", [len(row) for row in wanted], lengths)
    _check_range("labels", wanted, vocab_size, IGNORED)
    batch = Batch.of(ids, adapters=[adapter] * len(ids))
    flat_labels = np.concatenate(wanted)
    flat_weights = _float_column("weights", weights, lengths)
    counts = flat_labels != IGNORED
    counts[batch.starts[:-1]] = False  # nothing stands before a row's first token
    if flat_weights is not None:
        counts &= flat_weights > 0
    places = np.flatnonzero(counts)
    if not len(places):
        raise InvalidRequestError.of(
            "labels", f"must have one at least that counts: not {IGNORED}, not a row's first, with a weight over 0"
        )
    old = _float_column("logprobs", logprobs, lengths)
    gains = _float_column("advantages", advantages, lengths)
    targets = Targets(
        flat_labels[places],
        np.ones(len(places)) if flat_weights is None else flat_weights[places],
        None if old is None else old[places],
        None if gains is None else gains[places],
    )
    return TrainingBatch(batch, places - 1, targets)


def sound_numbers(field: str, numbers: NDArray[Any]) -> tuple[NDArray[np.bool_], str]:
    """Return which of a field's numbers can be used, and the words for those that can."""
    if field != "weights":
        return np.isfinite(numbers), "a finite number"
    sound = (numbers == 0) | ((numbers >= SMALLEST_WEIGHT) & (numbers <= LARGEST_WEIGHT))
    return sound, f"0, or from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"


def _int_rows(field: str, rows: Rows) -> list[NDArray[np.int64]]:
    arrays = [np.asarray(row) for row in _listed(field, rows)]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError.of(
                f"{field}[{number}]", f"must be a list of whole numbers, but is {array.dtype} of shape {array.shape}"
            )
    return [array.astype(np.int64) for array in arrays]


def _check_range(field: str, rows: list[NDArray[np.int64]], vocab_size: int, also: int | None = None) -> None:
    for number, row in enumerate(rows):
        outside = (row < 0) | (row >= vocab_size)
        wrong = np.flatnonzero(outside if also is None else outside & (row != also))
        if len(wrong):
            allowed = f"0 to {vocab_size - 1}" + ("" if also is None else f", or {also} to be ignored")
            raise InvalidRequestError.of(f"{field}[{number}][{wrong[0]}]", f"must be {allowed}, but is {row[wrong[0]]}")


def _check_lengths(field: str, lengths: list[int], expected: list[int]) -> None:
    if lengths != expected:
        raise InvalidRequestError.of(
            field, f"must have rows as long as those of input_ids, {expected}, but has {lengths}"
        )


def _float_column(field: str, rows: FloatRows | None, lengths: list[int]) -> NDArray[np.float64] | None:
    if rows is None:
        return None
    try:
        arrays = [np.asarray(row, np.float64).reshape(len(row)) for row in _listed(field, rows)]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError.of(field, f"must be lists of numbers, but {error}") from error
    _check_lengths(field, [len(row) for row in arrays], lengths)
    flat = np.concatenate(arrays)
    sound, allowed = sound_numbers(field, flat)
    wrong = np.flatnonzero(~sound)
    if len(wrong):
        raise InvalidRequestError.of(
            field, f"must be {allowed}, but token {wrong[0]} of the batch has {flat[wrong[0]]}"
        )
    return flat


def _listed(field: str, rows: Iterable[Any]) -> list[Any]:
    try:
        return list(rows)
    except TypeError:
        raise InvalidRequestError.of(field, f"must be a list of rows, but is {rows!r:.80}") from None
