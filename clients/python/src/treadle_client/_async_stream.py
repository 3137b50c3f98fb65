"""The asynchronous stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from treadle_protos.v1.generation_pb2 import GenerateStreamResponse

from treadle_client._models import Chunk
from treadle_client._retry import Attempts
from treadle_client._status import from_rpc_error
from treadle_client._stream import Received


class AsyncStream(Received):
    """An asynchronous iterator of chunks. The request is sent at once; the first `anext` waits for the server's answer.

    Closing the stream, leaving its `async with` block, dropping the last reference to it or an exception while it waits
    (the task's cancellation too) cancels the request on the server.
    """

    _call: Any = None

    def __init__(
        self, start: Callable[[float | None], Any], attempts: Attempts, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        """Send the request.

        Args:
            start: sends it with a timeout in seconds and returns grpc.aio's call.
            attempts: when to send it again, as long as nothing was received.
            sleep: waits for seconds.
        """
        super().__init__()
        self._start = start
        self._attempts = attempts
        self._sleep = sleep
        self._closed = False
        self._call = start(attempts.remaining_s())

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._closed:
            chunk = self._receive(await self._read_or_close())
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _read_or_close(self) -> Any:
        try:
            response = await self._read()
        except grpc.RpcError as error:
            self._cancel()
            raise from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer) from None
        except asyncio.CancelledError:
            was_closed = self._closed
            self._cancel()
            task = asyncio.current_task()
            if was_closed and not (task is not None and task.cancelling()):  # by another task: the stream ends
                raise StopAsyncIteration from None
            raise
        except BaseException:
            self._cancel()
            raise
        if not isinstance(response, GenerateStreamResponse):  # grpc.aio.EOF
            self._cancel()
            raise StopAsyncIteration
        return response

    async def _read(self) -> Any:
        """Wait for the next message; open the stream again where the server asks for it."""
        while True:
            try:
                return await self._call.read()
            except grpc.RpcError as error:
                delay_s = None
                if not (self._anything or self._closed):
                    failure = from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer)
                    delay_s = self._attempts.next_delay_s(failure)
                if delay_s is None:
                    raise
            await self._sleep(delay_s)
            if self._closed:
                raise StopAsyncIteration
            self._call = self._start(self._attempts.remaining_s())

    async def close(self) -> None:
        """Cancel the request unless it is finished; iterating ends. What was received stays readable."""
        self._cancel()

    def _cancel(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.cancel()
