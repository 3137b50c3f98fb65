"""How many requests run now, so that a draining server knows when the last one has ended."""

from __future__ import annotations

import asyncio
from types import TracebackType


class ActiveRequests:
    """A context manager around every request. Belongs to one event loop."""

    def __init__(self) -> None:
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._num_active += 1
        self._idle.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_active -= 1
        if not self._num_active:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False when some still do after the timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
