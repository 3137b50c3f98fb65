"""The threads of a training step: what several parts of a batch, or of the parameters, are worked out on at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BlasThreads:
    """As many threads as matrix products use."""

    def __init__(self) -> None:
        self._controller = ThreadpoolController().select(user_api="blas")
        self.number: int = max((library["num_threads"] for library in self._controller.info()), default=1)

    def shared(self, function: Callable[[ItemT], ResultT], parts: Sequence[ItemT]) -> list[ResultT]:
        """Return the function's results of all parts, a thread each; products share the threads that there were."""
        if len(parts) == 1:
            return [function(parts[0])]
        with self._controller.limit(limits=self.number // len(parts)):
            return _on_threads(len(parts), function, parts)

    def each(self, function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
        """Return the function's results of all items, which any of the threads takes; it makes no products."""
        if self.number == 1 or len(items) == 1:
            return [function(item) for item in items]
        return _on_threads(self.number, function, items)


def _on_threads(number: int, function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    def run(item: ItemT) -> ResultT:
        with np.errstate(all="ignore"):  # a thread does not inherit the caller's
            return function(item)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, items))
