"""The one thread that trains: calls run one at a time, in the order in which they came, and few may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from treadle_server.errors import QueueFullError

_T = TypeVar("_T")
# A call takes about a second, as a step of a small model does; clients only need an order of magnitude.
_RETRY_AFTER_S = 1.0


class TrainerWorker:
    """Runs functions one after the other. A call that is cancelled before its turn never runs; a later one ends."""

    def __init__(self, max_calls: int) -> None:
        self.max_calls = max_calls
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="treadle-trainer")
        self._lock = threading.Lock()
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""
        return self._num_calls

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run a function on the thread and return what it does.

        Raises:
            QueueFullError: as many calls as are allowed run or wait.
        """
        with self._lock:
            if self._num_calls >= self.max_calls:
                message = f"{self._num_calls} calls run or wait, as many as this trainer allows"
                raise QueueFullError(message, _RETRY_AFTER_S)
            self._num_calls += 1
        future = self._executor.submit(function)
        future.add_done_callback(self._left)
        return await asyncio.wrap_future(future)

    def _left(self, future: Future[Any]) -> None:
        with self._lock:
            self._num_calls -= 1

    def close(self) -> None:
        """Drop the calls that wait; the one that runs ends."""
        self._executor.shutdown(wait=False, cancel_futures=True)
