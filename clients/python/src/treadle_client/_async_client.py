"""The asynchronous client: `_client` with `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from treadle_protos.v1 import model_pb2, sampler_pb2, server_pb2

from treadle_client import _convert
from treadle_client._async_stream import AsyncStream
from treadle_client._channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    Connection,
    Stubs,
    TlsOptions,
    says_serving,
)
from treadle_client._client import POLL_S
from treadle_client._exceptions import ClientClosedError, UnavailableError, UnimplementedError
from treadle_client._models import (
    Generation,
    Message,
    Model,
    ModelLoad,
    Preview,
    Samplers,
    Score,
    ServerInfo,
    Token,
    Trace,
)
from treadle_client._options import GenerationOptions, PreviewOptions, Prompt, make_preview_request
from treadle_client._retry import Attempts
from treadle_client._status import from_rpc_error


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods and errors. It belongs to the event loop of its first call."""

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
        )
        self._clock = time.monotonic
        self._sleep = asyncio.sleep
        self._closed = False
        self._channel: Any = None  # opened by the first call: a channel belongs to the loop that runs then
        self._stubs: Stubs | None = None

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **knobs: Unpack[GenerationOptions]
    ) -> AsyncStream:
        """As `Client.stream`; it is not awaited itself: `async for chunk in client.stream(...)`."""
        request = _convert.generate_stream_request(prompt, knobs)
        method = self._open_stubs().generation.GenerateStream
        metadata = self._connection.metadata
        return AsyncStream(
            lambda remaining_s: method(request, timeout=remaining_s, metadata=metadata),
            self._attempts(timeout_s),
            self._sleep,
        )

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **knobs: Unpack[GenerationOptions]
    ) -> Generation:
        """As `Client.generate`."""
        request = _convert.generate_request(prompt, knobs)
        response = await self._call(self._open_stubs().generation.Generate, request, timeout_s)
        return _convert.generation_from_proto(response)

    async def score(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapter: str | None = None,
        top_logprobs: int | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """As `Client.score`."""
        request = _convert.score_request(prompt, model=model, adapter=adapter, num_top_logprobs=top_logprobs)
        return _convert.score_from_proto(await self._call(self._open_stubs().generation.Score, request, timeout_s))

    async def tokenize(
        self,
        prompt: str | Sequence[Message | Mapping[str, str]],
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Token, ...]:
        """As `Client.tokenize`."""
        request = _convert.tokenize_request(prompt, model=model, add_special_tokens=add_special_tokens)
        return _convert.tokens_from_proto(await self._call(self._open_stubs().generation.Tokenize, request, timeout_s))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """As `Client.detokenize`."""
        request = _convert.detokenize_request(token_ids=token_ids, model=model, special_tokens=special_tokens)
        response = await self._call(self._open_stubs().generation.Detokenize, request, timeout_s)
        return str(response.text)

    async def trace(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapter: str | None = None,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Trace:
        """As `Client.trace`."""
        request = _convert.trace_request(prompt, model=model, adapter=adapter, layers=layers, what=what)
        responses = await self._call(_collected(self._open_stubs().trace.Trace), request, timeout_s)
        return _convert.trace_from_proto(responses)

    async def preview(
        self,
        prompt: Prompt | None = None,
        *,
        logits: Sequence[float] | None = None,
        timeout_s: float | None = None,
        **knobs: Unpack[PreviewOptions],
    ) -> Preview:
        """As `Client.preview`."""
        request = make_preview_request(prompt, logits, knobs)
        response = await self._call(self._open_stubs().trace.PreviewSampling, request, timeout_s)
        return _convert.preview_from_proto(response)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """As `Client.list_models`."""
        response = await self._call(self._open_stubs().model.ListModels, model_pb2.ListModelsRequest(), timeout_s)
        return _convert.models_from_proto(response)

    async def get_model(self, model: str | None = None, *, timeout_s: float | None = None) -> Model:
        """As `Client.get_model`."""
        request = _convert.get_model_request(model=model)
        response = await self._call(self._open_stubs().model.GetModel, request, timeout_s)
        return _convert.model_from_proto(response.model)

    async def list_samplers(self, *, timeout_s: float | None = None) -> Samplers:
        """As `Client.list_samplers`."""
        request = sampler_pb2.ListSamplersRequest()
        response = await self._call(self._open_stubs().sampler.ListSamplers, request, timeout_s)
        return _convert.samplers_from_proto(response)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """As `Client.server_info`."""
        request = server_pb2.GetServerInfoRequest()
        response = await self._call(self._open_stubs().server.GetServerInfo, request, timeout_s)
        return _convert.server_info_from_proto(response)

    async def get_load(self, *, timeout_s: float | None = None) -> tuple[ModelLoad, ...]:
        """As `Client.get_load`."""
        response = await self._call(self._open_stubs().server.GetLoad, server_pb2.GetLoadRequest(), timeout_s)
        return _convert.load_from_proto(response)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """As `Client.wait_ready`."""
        attempts = self._attempts(timeout_s)
        while not await self._is_serving(attempts):
            await self._sleep(POLL_S)

    async def close(self) -> None:
        """As `Client.close`."""
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

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Call a unary RPC, again where the server asks for it."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return await method(request, timeout=attempts.remaining_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, attempts.timeout_s)
                delay_s = attempts.next_delay_s(failure)
                if delay_s is None:
                    raise failure from error
            await self._sleep(delay_s)

    async def _is_serving(self, attempts: Attempts) -> bool:
        try:
            reply = await self._open_stubs().health_check(
                b"", timeout=attempts.remaining_s(), metadata=self._connection.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            failure = from_rpc_error(error, attempts.timeout_s, "ready server")
            if isinstance(failure, UnavailableError):
                return False
            if isinstance(failure, UnimplementedError):  # a server without the health service answers, so it is up
                return True
            raise failure from error
        return says_serving(reply)


def _collected(method: Any) -> Callable[..., Awaitable[list[Any]]]:
    """Return a method that takes what another one streams all at once."""

    async def call(request: Any, **keywords: Any) -> list[Any]:
        return [response async for response in method(request, **keywords)]

    return call
