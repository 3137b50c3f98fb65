"""What a stream has received, for both clients, and the synchronous stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc

from treadle_client._convert import chunk_from_proto, prompt_info_from_proto
from treadle_client._models import Chunk, Finish, PromptInfo
from treadle_client._retry import Attempts
from treadle_client._status import from_rpc_error


class Received:
    """What has arrived on a stream so far. It stays readable after an error, a Ctrl-C or a close."""

    def __init__(self) -> None:
        self._prompt_info: PromptInfo | None = None
        self._texts: dict[int, list[str]] = {}
        self._finishes: dict[int, Finish] = {}
        self._anything = False

    @property
    def prompt_info(self) -> PromptInfo | None:
        """What the server made of the request; None before the first chunk."""
        return self._prompt_info

    @property
    def text(self) -> str:
        """The text of the first choice so far."""
        return "".join(self._texts.get(0, ()))

    @property
    def texts(self) -> tuple[str, ...]:
        """The text so far of each choice up to the last one that has any."""
        return tuple("".join(self._texts.get(i, ())) for i in range(max(self._texts, default=-1) + 1))

    @property
    def finishes(self) -> Mapping[int, Finish]:
        """How each choice ended, by its index, for those that have."""
        return MappingProxyType(self._finishes)

    def _receive(self, response: Any) -> Chunk | None:
        """Keep what a message says; return its chunk, None for the message that carries the prompt info."""
        self._anything = True
        if response.WhichOneof("event") == "prompt_info":
            self._prompt_info = prompt_info_from_proto(response.prompt_info)
            return None
        chunk = chunk_from_proto(response)
        if chunk.finish is not None:
            self._finishes[chunk.index] = chunk.finish
        self._texts.setdefault(chunk.index, []).append(chunk.text)
        return chunk


class Stream(Received):
    """An iterator of chunks. The request is sent at once; the first `next` waits for the server's answer.

    Closing the stream, leaving its `with` block, dropping the last reference to it or an exception while it waits (a
    Ctrl-C too) cancels the request on the server.
    """

    _call: Any = None

    def __init__(
        self, start: Callable[[float | None], Any], attempts: Attempts, sleep: Callable[[float], None]
    ) -> None:
        """Send the request.

        Args:
            start: sends it with a timeout in seconds and returns grpc's iterator.
            attempts: when to send it again, as long as nothing was received.
            sleep: waits for seconds.
        """
        super().__init__()
        self._start = start
        self._attempts = attempts
        self._sleep = sleep
        self._closed = False
        self._call = start(attempts.remaining_s())

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._closed:
            chunk = self._receive(self._read_or_close())
            if chunk is not None:
                return chunk
        raise StopIteration

    def _read_or_close(self) -> Any:
        try:
            return self._read()
        except grpc.RpcError as error:
            was_closed = self._closed
            self.close()
            if was_closed:  # by another thread, which wanted the stream to end
                raise StopIteration from None
            raise from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer) from None
        except BaseException:
            self.close()
            raise

    def _read(self) -> Any:
        """Wait for the next message; open the stream again where the server asks for it."""
        while True:
            try:
                return next(self._call)
            except grpc.RpcError as error:
                delay_s = None
                if not (self._anything or self._closed):
                    failure = from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer)
                    delay_s = self._attempts.next_delay_s(failure)
                if delay_s is None:
                    raise
            self._sleep(delay_s)
            if self._closed:
                raise StopIteration
            self._call = self._start(self._attempts.remaining_s())

    def close(self) -> None:
        """Cancel the request unless it is finished; iterating ends. What was received stays readable."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()
