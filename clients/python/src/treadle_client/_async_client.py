"""The asynchronous client: `_client` with `await`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Unpack

from treadle_protos.v1 import model_pb2, sampler_pb2, server_pb2

from treadle_client import _convert
from treadle_client._async_base import BaseAsyncClient
from treadle_client._async_stream import AsyncStream
from treadle_client._models import (
    Adapter,
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


class AsyncClient(BaseAsyncClient):
    """`Client` for asyncio: the same arguments, methods and errors. It belongs to the event loop of its first call."""

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
        request = _convert.make_request(model_pb2.GetModelRequest, model=model)
        response = await self._call(self._open_stubs().model.GetModel, request, timeout_s)
        return _convert.model_from_proto(response.model)

    async def load_model(self, source: str, *, name: str | None = None, timeout_s: float | None = None) -> Model:
        """As `Client.load_model`."""
        request = _convert.make_request(model_pb2.LoadModelRequest, source=source, model=name)
        response = await self._change(self._open_stubs().model.LoadModel, request, timeout_s)
        return _convert.model_from_proto(response.model)

    async def unload_model(self, model: str, *, timeout_s: float | None = None) -> None:
        """As `Client.unload_model`."""
        request = _convert.make_request(model_pb2.UnloadModelRequest, model=model)
        await self._change(self._open_stubs().model.UnloadModel, request, timeout_s)

    async def update_weights(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        label: str | None = None,
        expected_version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `Client.update_weights`."""
        request = _convert.make_request(
            model_pb2.UpdateWeightsRequest,
            path=os.fspath(path),
            model=model,
            label=label,
            expected_version=expected_version,
        )
        response = await self._change(self._open_stubs().model.UpdateWeights, request, timeout_s)
        return int(response.weight_version)

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Adapter:
        """As `Client.load_adapter`."""
        request = _convert.make_request(model_pb2.LoadAdapterRequest, adapter=name, path=os.fspath(path), model=model)
        response = await self._change(self._open_stubs().model.LoadAdapter, request, timeout_s)
        return _convert.adapter_from_proto(response.adapter)

    async def unload_adapter(self, name: str, *, model: str | None = None, timeout_s: float | None = None) -> None:
        """As `Client.unload_adapter`."""
        request = _convert.make_request(model_pb2.UnloadAdapterRequest, adapter=name, model=model)
        await self._change(self._open_stubs().model.UnloadAdapter, request, timeout_s)

    async def list_adapters(self, *, model: str | None = None, timeout_s: float | None = None) -> tuple[Adapter, ...]:
        """As `Client.list_adapters`."""
        request = _convert.make_request(model_pb2.ListAdaptersRequest, model=model)
        response = await self._call(self._open_stubs().model.ListAdapters, request, timeout_s)
        return tuple(map(_convert.adapter_from_proto, response.adapters))

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


def _collected(method: Any) -> Callable[..., Awaitable[list[Any]]]:
    """Return a method that takes what another one streams all at once."""

    async def call(request: Any, **keywords: Any) -> list[Any]:
        return [response async for response in method(request, **keywords)]

    return call
