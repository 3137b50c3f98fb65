"""What the asynchronous clients of both services share: `_base` with `await`."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
import grpc.aio

from treadle_client._base import POLL_S
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


class BaseAsyncClient:
    """`BaseClient` for asyncio. It belongs to the event loop of its first call."""

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
        self._sleep = asyncio.sleep
        self._closed = False
        self._channel: Any = None  # opened by the first call: a channel belongs to the loop that runs then
        self._stubs: Stubs | None = None

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """As `BaseClient.wait_ready`."""
        attempts = self._attempts(timeout_s)
        while not await self._is_serving(attempts):
            await self._sleep(POLL_S)

    async def close(self) -> None:
        """As `BaseClient.close`."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_stubs(self) -> Stubs:
        if self._closed:
            raise ClientClosedError("the client is closed")
        if self._stubs is None:
            self._channel = self._connection.open(grpc.aio)
            self._stubs = Stubs(self._channel)
        return self._stubs

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return self._connection.attempts(timeout_s, self._clock)

    async def _change(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Call a unary RPC that changes the server, once: an answer that was lost may have been a yes."""
        return await self._call(method, request, timeout_s, retries=0)

    async def _call(self, method: Any, request: Any, timeout_s: float | None, *, retries: int | None = None) -> Any:
        """Call a unary RPC, again where the server asks for it."""
        attempts = self._connection.attempts(timeout_s, self._clock, retries)
        while True:
            try:
                return await method(request, timeout=attempts.remaining_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, attempts.timeout_s, peer=attempts.peer)
                delay_s = attempts.next_delay_s(failure)
                if delay_s is None:
                    raise failure from None
            await self._sleep(delay_s)

    async def _is_serving(self, attempts: Attempts) -> bool:
        try:
            reply = await self._open_stubs().health_check(
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
