"""A thread that makes batches ahead of need.

A thread and no process: the tokenizer and the matrix products of a training step run without the interpreter's lock,
and a thread shares the tokenizer, starts at once and dies with the command.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_LOOK_UP_S = 0.1  # how often a full queue asks whether anybody still waits


class Prefetcher(Generic[T]):
    """Runs an iterator in a thread, a few items ahead; yields the same items in the same order, and raises what it did.

    The thread ends with the `with` block.
    """

    def __init__(self, items: Iterator[T], depth: int = 4) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="treadle-batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # whoever asks again hears the same
            raise error
        return item  # type: ignore[return-value]  # None is then an item

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:  # noqa: BLE001 - raised again where the items are used
            self._put(None, error)

    def _put(self, item: T | None, error: BaseException | None) -> bool:
        """Hand an item over; False when nobody waits any more."""
        while not self._closed.is_set():
            try:
                self._ready.put((item, error), timeout=_LOOK_UP_S)
            except queue.Full:
                continue
            return True
        return False
