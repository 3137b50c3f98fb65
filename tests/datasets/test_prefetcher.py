"""The thread that works ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from treadle_server.datasets import Prefetcher


def counting(made: list[int]) -> Iterator[int]:
    """Yield numbers without end and note them."""
    number = 0
    while True:
        made.append(number)
        yield number
        number += 1


def test_items_come_in_order_and_a_few_ahead() -> None:
    """The thread makes no more than it may hold ahead, however long nobody asks."""
    made: list[int] = []
    with Prefetcher(counting(made), depth=3) as items:
        assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
        time.sleep(0.2)
        assert len(made) <= 5 + 3 + 1


def test_errors_arrive_after_the_items_before_them() -> None:
    """What the iterator raises is raised where its items are used, and again when asked again."""

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("bad line")

    with Prefetcher(failing()) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="bad line"):
                next(items)


def test_an_end_is_an_end() -> None:
    """A finite iterator ends the loop."""
    with Prefetcher(iter([1, 2])) as items:
        assert list(items) == [1, 2]


def test_the_thread_ends_with_the_block() -> None:
    """Nothing goes on after it."""
    before = threading.active_count()
    with Prefetcher(counting([])) as items:
        next(items)
    assert threading.active_count() == before
