"""What the synchronous clients of both services share: the connection, calls with retries, and waiting."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import grpc

from treadle_client._channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    Connection,
    Stubs,
    TlsOptions,
    says_serving,
)
from treadle_client._exceptions import ClientClosedError, UnavailableError, UnimplementedError
from treadle_client._peer import SERVER, Kind
from treadle_client._retry import Attempts
from treadle_client._status import from_rpc_error

POLL_S: Final = 0.1  # how often `wait_ready` asks a server that is loading


class BaseClient:
    """A connection; use it as a context manager, or close it. Threads may share it."""

    _kind: ClassVar[Kind] = SERVER

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        timeout_s: float | None = None,
        retries: int = 2,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._connection = Connection(
            target=target,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retries=retries,
            max_message_bytes=max_message_bytes,
            kind=self._kind,
        )
        self._clock = time.monotonic
        self._sleep = time.sleep
        self._closed = False
        self._channel: Any = self._connection.open(grpc)
        self._stubs = Stubs(self._channel)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the server answers and has loaded its models.

        Raises:
            DeadlineExceededError: when it is not ready in time.
        """
        attempts = self._attempts(timeout_s)
        while not self._is_serving(attempts):
            self._sleep(POLL_S)

    def close(self) -> None:
        """Close the connection and cancel what runs on it."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_stubs(self) -> Stubs:
        if self._closed:
            raise ClientClosedError("the client is closed")
        return self._stubs

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return self._connection.attempts(timeout_s, self._clock)

    def _change(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Call a unary RPC that changes the server, once: an answer that was lost may have been a yes."""
        return self._call(method, request, timeout_s, retries=0)

    def _call(self, method: Any, request: Any, timeout_s: float | None, *, retries: int | None = None) -> Any:
        """Call a unary RPC, again where the server asks for it."""
        attempts = self._connection.attempts(timeout_s, self._clock, retries)
        while True:
            try:
                return method(request, timeout=attempts.remaining_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, attempts.timeout_s, peer=attempts.peer)
                delay_s = attempts.next_delay_s(failure)
                if delay_s is None:
                    raise failure from None
            self._sleep(delay_s)

    def _is_serving(self, attempts: Attempts) -> bool:
        try:
            reply = self._open_stubs().health_check(
                b"", timeout=attempts.remaining_s(), metadata=self._connection.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            awaited = f"ready server at {self._connection.target}"
            failure = from_rpc_error(error, attempts.timeout_s, awaited, peer=attempts.peer)
            if isinstance(failure, UnavailableError):
                return False
            if isinstance(failure, UnimplementedError):  # a server without the health service answers, so it is up
                return True
            raise failure from None
        return says_serving(reply)
