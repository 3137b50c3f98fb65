"""When to try a call again: the server said after how long, or could not be reached; never past the timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from treadle_client._exceptions import QueueFullError, TreadleClientError, UnavailableError
from treadle_client._peer import Peer

_FIRST_DELAY_S: Final = 0.2
_MAX_DELAY_S: Final = 5.0


class Attempts:
    """Counts the tries and the seconds of one call.

    Args:
        retries: how often the call may be repeated.
        timeout_s: seconds for all tries together; None for no limit.
        clock: returns seconds that never go back.
        peer: whom the call goes to, for what an error says; None where nobody knows.
    """

    def __init__(
        self, *, retries: int, timeout_s: float | None, clock: Callable[[], float], peer: Peer | None = None
    ) -> None:
        self._retries = retries
        self._used = 0
        self._clock = clock
        self.timeout_s = timeout_s
        self.peer = peer
        self._end_s = None if timeout_s is None else clock() + timeout_s

    def remaining_s(self) -> float | None:
        """Return the seconds left, 0 or more; None for no limit."""
        return None if self._end_s is None else max(0.0, self._end_s - self._clock())

    def next_delay_s(self, failure: TreadleClientError) -> float | None:
        """Return the seconds to wait before the next try, which it counts; None when there is to be none."""
        delay_s = self._wanted_delay_s(failure)
        remaining_s = self.remaining_s()
        if delay_s is None or self._used >= self._retries or (remaining_s is not None and delay_s >= remaining_s):
            return None
        self._used += 1
        return delay_s

    def _wanted_delay_s(self, failure: TreadleClientError) -> float | None:
        if isinstance(failure, QueueFullError):
            return failure.retry_after_s
        if not isinstance(failure, UnavailableError):
            return None
        if failure.retry_after_s is not None:
            return failure.retry_after_s
        return min(_FIRST_DELAY_S * 2.0**self._used, _MAX_DELAY_S)
