"""Documents packed into batches of token ids: rows without padding, filled up to a number of tokens.

A row is a document or a part of one: rows never see each other in training, so no attention crosses from one document
to the next. A place in the data is three numbers, and a stream goes on from one exactly as it would have gone on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_server.datasets.dataset import Dataset
from treadle_server.datasets.documents import Document
from treadle_server.errors import DataError

Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Position:
    """The next row to be read.

    Attributes:
        epoch: epochs done.
        document: its document's place in the epoch's order.
        row: its place among the document's rows.
        num_rows: of that document.
    """

    epoch: int = 0
    document: int = 0
    row: int = 0
    num_rows: int = 1


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of token ids, each `[tokens] int64`, and where the stream goes on after them."""

    rows: Sequence[Row]
    after: Position

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))


class BatchStream:
    """The batches of a dataset's documents, epoch after epoch, in an order that depends on the seed alone.

    No batch holds rows of two epochs; an epoch's last one may be small.
    """

    def __init__(
        self,
        dataset: Dataset,
        document_ids: NDArray[np.int64],
        encode: Callable[[Document], Sequence[int]],
        *,
        sequence_length: int,
        batch_tokens: int,
        seed: int = 0,
    ) -> None:
        self._dataset, self._document_ids, self._encode = dataset, document_ids, encode
        self._sequence_length, self._batch_tokens, self._seed = sequence_length, batch_tokens, seed

    def epochs_done(self, position: Position) -> float:
        """Return how many epochs lie before a position, the share of the one it is in included."""
        return position.epoch + (position.document + position.row / position.num_rows) / len(self._document_ids)

    def batches(self, start: Position) -> Iterator[TokenBatch]:
        """Yield batches from a position on, without end. Raises DataError when there is nothing to learn from."""
        while True:
            num_batches = 0
            for batch in self.epoch(start):
                num_batches += 1
                yield batch
            if not num_batches and start == Position(start.epoch):
                raise DataError("the data is too short: no document has two tokens, one to predict the other")
            start = Position(start.epoch + 1)

    def epoch(self, start: Position) -> Iterator[TokenBatch]:
        """Yield the batches from a position to the end of its epoch."""
        return pack(self._rows(start), self._batch_tokens, Position(start.epoch + 1))

    def _rows(self, start: Position) -> Iterator[tuple[Position, Row]]:
        order = self._dataset.order(self._document_ids, self._seed, start.epoch)
        first_row = start.row
        for place in range(start.document, len(order)):
            rows = split_rows(self._encode(self._dataset.read(int(order[place]))), self._sequence_length)
            for number in range(first_row, len(rows)):
                yield Position(start.epoch, place, number, len(rows)), rows[number]
            first_row = 0


def split_rows(ids: Sequence[int], sequence_length: int) -> list[Row]:
    """Cut ids into as few rows of at most `sequence_length` (3 or more) tokens as will do, of about one length.

    So no row is left with the single token that predicts nothing; a document of one token gives no row.
    """
    if len(ids) < 2:
        return []
    return np.array_split(np.asarray(ids, np.int64), -(-len(ids) // sequence_length))


def pack(rows: Iterable[tuple[Position, Row]], batch_tokens: int, end: Position) -> Iterator[TokenBatch]:
    """Group rows in their order into batches of at most `batch_tokens` tokens; a longer row is a batch of its own."""
    held: list[Row] = []
    num_tokens = 0
    for position, row in rows:
        if held and num_tokens + len(row) > batch_tokens:
            yield TokenBatch(tuple(held), position)
            held, num_tokens = [], 0
        held.append(row)
        num_tokens += len(row)
    if held:
        yield TokenBatch(tuple(held), end)
