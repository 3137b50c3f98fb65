"""The sequences that wait: new requests, as many as the limits allow, and those that lost their memory."""

from __future__ import annotations

import threading
import time
from bisect import insort_right
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from treadle_server.engine.sequence import Sequence
from treadle_server.errors import QueueFullError, UnavailableError

# Starts that the rate is measured over.
_MEASURED_STARTS: Final = 32
# What a refused request is told to wait when nothing has been measured yet, and the bounds of what is measured.
_UNKNOWN_S: Final = 1.0
_SHORTEST_S, _LONGEST_S = 0.1, 60.0


class StartRate:
    """How fast requests leave the queue while there is one, to tell a refused one when to come back."""

    def __init__(self) -> None:
        self._starts: deque[tuple[float, int]] = deque(maxlen=_MEASURED_STARTS + 1)
        self._num_refused = 0
        self._per_place_s = self._per_token_s = 0.0

    def fill(self) -> None:
        """Measure from now on: the queue was empty, so nothing waited for a place."""
        self._starts.clear()
        self._starts.append((time.monotonic(), 0))

    def started(self, num_tokens: int) -> None:
        """Note that a request of so many prompt tokens has left the queue."""
        self._starts.append((time.monotonic(), num_tokens))
        self._num_refused = 0
        elapsed_s = self._starts[-1][0] - self._starts[0][0]
        tokens = sum(num for _, num in list(self._starts)[1:])
        self._per_place_s = elapsed_s / max(len(self._starts) - 1, 1)
        self._per_token_s = elapsed_s / max(tokens, 1)

    def retry_after_s(self, num_tokens: int) -> float:
        """Return when a place, and room for so many tokens, is free for one more than were refused since a start."""
        self._num_refused += 1
        if not self._per_place_s:
            return _UNKNOWN_S
        place_s = max(self._per_place_s, time.monotonic() - self._starts[-1][0])  # the queue may be stuck
        return min(max(place_s * self._num_refused, self._per_token_s * num_tokens, _SHORTEST_S), _LONGEST_S)


class RequestQueue:
    """Ordered by rank, first come first served among equals. Every method may be called from any thread."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._new: list[Sequence] = []
        self._returned: list[Sequence] = []
        self._rate = StartRate()
        self._lock = threading.Lock()
        self._closed = False

    def admit(self, sequence: Sequence) -> None:
        """Queue the first sequence of a request.

        Raises:
            QueueFullError: the queue holds as many requests or prompt tokens as it may.
            UnavailableError: the queue is closed.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the model takes no new requests: it is being unloaded")
            self._check_room(sequence.num_tokens)
            if not self._new:
                self._rate.fill()
            insort_right(self._new, sequence, key=_rank)

    def _check_room(self, num_tokens: int) -> None:
        tokens = sum(s.num_tokens for s in self._new)
        if len(self._new) >= self._max_requests:
            raise QueueFullError(f"{len(self._new)} requests are waiting, the limit", self._rate.retry_after_s(0))
        if self._new and tokens + num_tokens > self._max_tokens:
            wait_s = self._rate.retry_after_s(tokens + num_tokens - self._max_tokens)
            raise QueueFullError(f"{tokens} prompt tokens are waiting; the limit is {self._max_tokens}", wait_s)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that ran, or a further choice of one; no limit holds for these."""
        with self._lock:
            insort_right(self._returned, sequence, key=_rank)

    def first(self) -> Sequence | None:
        """Return the sequence that should start next; those whose readers lag wait for their readers."""
        if not self._new and not self._returned:
            return None
        with self._lock:
            heads = [next(_ready(self._returned), None), next(_ready(self._new), None)]
            return min((s for s in heads if s is not None), key=_rank, default=None)

    def start(self, sequence: Sequence) -> None:
        """Take a sequence out, to run."""
        with self._lock:
            if sequence in self._new:
                self._new.remove(sequence)
                self._rate.started(sequence.num_tokens)
            else:
                self._returned.remove(sequence)

    def drop(self, is_unwanted: Callable[[Sequence], bool]) -> None:
        """Forget sequences."""
        with self._lock:
            self._new = [s for s in self._new if not is_unwanted(s)]
            self._returned = [s for s in self._returned if not is_unwanted(s)]

    def close(self) -> None:
        """Refuse every later request."""
        with self._lock:
            self._closed = True

    @property
    def new(self) -> list[Sequence]:
        """The sequences that wait for their first step."""
        with self._lock:
            return list(self._new)

    @property
    def returned(self) -> list[Sequence]:
        """The sequences that wait to go on."""
        with self._lock:
            return list(self._returned)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _ready(sequences: list[Sequence]) -> Iterator[Sequence]:
    return (s for s in sequences if not s.is_paused)
