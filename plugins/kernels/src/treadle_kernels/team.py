"""The threads that compute: the caller's and its helpers, which sleep between steps."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_kernels.chunks import new_control


@dataclass(frozen=True, slots=True)
class Work:
    """What every thread calls with its number, and what must live until the last of them is through."""

    call: Callable[[int], None]
    kept: object = None


class Team:
    """Runs compiled functions, which take turns at chunks, on several threads at once.

    Attributes:
        num_threads: threads that compute, the caller's included.
        control: what they agree by; see `chunks`.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.control = new_control(num_threads)
        self._busy = threading.Lock()
        self._operation = 1
        self._scratch: NDArray[np.float32] = np.empty((num_threads, 0), np.float32)
        self._inboxes = [queue.SimpleQueue[Work | None]() for _ in range(1, num_threads)]
        for number, inbox in enumerate(self._inboxes, 1):
            threading.Thread(target=_help, args=(number, inbox), name=f"kernels-{number}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._inboxes)

    def scratch(self, num_floats: int) -> NDArray[np.float32]:
        """Return room for each thread, `[threads, num_floats]`, for one run: it keeps nothing until the next."""
        room = self._scratch
        if room.shape[1] < num_floats:
            room = self._scratch = np.empty((self.num_threads, num_floats), np.float32)
        return room[:, :num_floats]

    def run(self, num_operations: int, make: Callable[[int], Work]) -> None:
        """Run `make(first operation)` on each thread; return when the caller's own is through.

        A helper may come late: it then finds nothing to do.
        """
        with self._busy:
            work = make(self._operation)
            self._operation += num_operations
            for inbox in self._inboxes:
                inbox.put(work)
            work.call(0)


def _help(number: int, inbox: queue.SimpleQueue[Work | None]) -> None:
    while (work := inbox.get()) is not None:
        work.call(number)
        del work  # it holds weights and caches


def _dismiss(inboxes: list[queue.SimpleQueue[Work | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
