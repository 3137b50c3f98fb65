"""How long work tells how far it has come."""

from __future__ import annotations

from collections.abc import Callable

# Called with a description, the bytes done, and the bytes there are (0 when that is not known).
Progress = Callable[[str, int, int], None]


class Reporter:
    """Counts the bytes of one piece of work and passes the count on; silent without a callback."""

    def __init__(self, progress: Progress | None, description: str, total_bytes: int) -> None:
        self._progress = progress
        self._description = description
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Add to the bytes done."""
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._description, self._done_bytes, self._total_bytes)
