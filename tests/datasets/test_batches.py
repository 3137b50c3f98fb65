"""Documents packed into batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from treadle_server.datasets import BatchStream, Dataset, Position
from treadle_server.datasets.batches import split_rows
from treadle_server.datasets.documents import Document
from treadle_server.errors import DataError

FIRST = Position()


class Lists:
    """A source whose documents are lists of ids that nothing else has."""

    def __init__(self, lengths: Sequence[int], blocks: Sequence[int] | None = None) -> None:
        self._lengths = lengths
        self._blocks = np.array(range(len(lengths)) if blocks is None else blocks, np.int64)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Numbers as they were given."""
        return self._blocks

    def read(self, index: int) -> Document:
        """Return what `encode` knows again."""
        return Document(str(index))

    def encode(self, document: Document) -> list[int]:
        """Return ids that say where they belong."""
        index = int(document.origin)
        return [1000 * index + place for place in range(self._lengths[index])]


def stream(lengths: Sequence[int], sequence_length: int = 4, batch_tokens: int = 8, seed: int = 0) -> BatchStream:
    """Return the stream of documents with these lengths."""
    source = Lists(lengths)
    dataset = Dataset([source])
    return BatchStream(
        dataset,
        np.arange(len(lengths)),
        source.encode,
        sequence_length=sequence_length,
        batch_tokens=batch_tokens,
        seed=seed,
    )


def plain(batches: BatchStream, num: int, start: Position = FIRST) -> list[list[list[int]]]:
    """Return the rows of the next batches as lists."""
    return [[row.tolist() for row in batch.rows] for batch in itertools.islice(batches.batches(start), num)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    sequence_length=st.integers(3, 12),
    more=st.integers(0, 20),
    seed=st.integers(0, 5),
)
def test_every_token_appears_once(lengths: list[int], sequence_length: int, more: int, seed: int) -> None:
    """An epoch has each token of each document once, in its document's order, within both limits; no row mixes two."""
    batches = list(stream(lengths, sequence_length, sequence_length + more, seed).epoch(Position()))
    rows = [row.tolist() for batch in batches for row in batch.rows]
    expected = [1000 * index + place for index, length in enumerate(lengths) if length > 1 for place in range(length)]
    assert sorted(token for row in rows for token in row) == expected
    for row in rows:
        assert 2 <= len(row) <= sequence_length
        assert row == list(range(row[0], row[0] + len(row)))
    assert all(batch.num_tokens <= sequence_length + more for batch in batches)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1),
    done=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_a_stream_goes_on_from_any_batch(lengths: list[int], done: int, seed: int) -> None:
    """From the position after any batch come the same batches as without the pause, over the end of epochs too."""
    before = list(itertools.islice(stream(lengths, seed=seed).batches(Position()), done))
    assert plain(stream(lengths, seed=seed), done + 6)[done:] == plain(stream(lengths, seed=seed), 6, before[-1].after)


def test_a_full_batch_has_no_room_left() -> None:
    """Rows are added as long as they fit: three documents of four tokens make a batch of twelve."""
    batches = list(stream([4, 4, 4, 4, 4, 4], batch_tokens=12).epoch(Position()))
    assert [batch.num_tokens for batch in batches] == [12, 12]


def test_epochs_are_shuffled_apart() -> None:
    """Two epochs have the same documents in another order, another seed yet another."""
    first, second = plain(stream([2] * 20, batch_tokens=40), 2)
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != plain(stream([2] * 20, batch_tokens=40, seed=1), 1)[0]


def test_no_batch_spans_two_epochs() -> None:
    """The last batch of an epoch is as small as what is left, and the next position is the next epoch's first."""
    batches = list(itertools.islice(stream([4, 4, 4]).batches(Position()), 3))
    assert [(batch.num_tokens, batch.after.epoch) for batch in batches] == [(8, 0), (4, 1), (8, 1)]
    assert batches[1].after == Position(1)


def test_the_share_of_an_epoch_grows_with_each_row() -> None:
    """One document of many rows counts by its rows."""
    one = stream([16], batch_tokens=4)
    done = [one.epochs_done(batch.after) for batch in itertools.islice(one.batches(Position()), 5)]
    assert done == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_rows_of_a_document_are_of_one_length() -> None:
    """A document a little too long is halved; no row is left with a token that predicts nothing."""
    assert [len(row) for row in split_rows(range(9), 8)] == [5, 4]
    assert split_rows([1], 8) == []


def test_data_that_teaches_nothing_is_refused() -> None:
    """Documents of one token predict nothing, so there is no batch to wait for."""
    with pytest.raises(DataError, match="too short: no document has two tokens"):
        next(stream([1, 0, 1]).batches(Position()))


def test_blocks_stay_together() -> None:
    """Documents that can only be read together follow one another, in shuffled order."""
    dataset = Dataset([Lists([1] * 6, [0, 0, 0, 1, 1, 1]), Lists([1] * 2)])
    orders = [dataset.order(np.arange(8), 0, epoch).tolist() for epoch in range(20)]
    for order in orders:
        places = [order.index(document) for document in range(6)]
        assert max(places[:3]) - min(places[:3]) == 2
        assert max(places[3:]) - min(places[3:]) == 2
    assert len({tuple(order) for order in orders}) > 10
