"""What was delivered to a reader and not taken by it yet: the measure of a reader that lags behind its stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from treadle_server.engine.events import EngineEvent, size_of


class Backlog:
    """Counts tokens, the likely ones listed beside them included. The engine thread gives, the reader's thread takes.

    Attributes:
        limit: tokens that may wait for the reader before no more are made for it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._moved_s = time.monotonic()

    def give(self, events: Iterable[EngineEvent]) -> None:
        """Count events that were delivered."""
        with self._lock:
            was_full = self.is_full
            self._num_waiting += size_of(events)
            if not was_full:
                self._moved_s = time.monotonic()

    def take(self, events: Iterable[EngineEvent]) -> bool:
        """Count events that the reader is done with; tell if that made room where there was none."""
        with self._lock:
            was_full = self.is_full
            self._num_waiting -= size_of(events)
            self._moved_s = time.monotonic()
            return was_full and not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether as much waits as may."""
        return self._num_waiting >= self.limit

    @property
    def stalled_s(self) -> float:
        """Seconds since the reader last took something, while the backlog is full; else 0."""
        return time.monotonic() - self._moved_s if self.is_full else 0.0
