"""How many requests of one client may run at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from treadle_server.errors import QueueFullError

_RETRY_AFTER_S: Final = 1.0


class ClientLimits:
    """Counts the requests of each client by name. Belongs to one event loop."""

    def __init__(self, max_requests: int | None) -> None:
        self._max_requests = max_requests
        self._num_running: Counter[str] = Counter()

    @contextmanager
    def place_for(self, client: str) -> Iterator[None]:
        """Count a request of a client while the block runs.

        Raises:
            QueueFullError: as many as are allowed run already.
        """
        if self._max_requests is not None and self._num_running.get(client, 0) >= self._max_requests:
            message = f"the client {client} has {self._max_requests} requests under way, as many as one may have"
            raise QueueFullError(message, _RETRY_AFTER_S)
        self._num_running[client] += 1
        try:
            yield
        finally:
            self._num_running[client] -= 1
            if not self._num_running[client]:
                del self._num_running[client]
