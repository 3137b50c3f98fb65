"""The synchronous client. `_async_client` has the same methods with `await`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from treadle_protos.v1 import model_pb2, sampler_pb2, server_pb2

from treadle_client import _convert
from treadle_client._base import BaseClient
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
from treadle_client._stream import Stream


class Client(BaseClient):
    """A connection to a treadle server; use it as a context manager, or close it. Threads may share it.

    Every call takes `timeout_s`: seconds for it, retries included; None takes the client's own, infinity sets no limit.

    Args:
        target: host:port of the server, or another gRPC target such as `unix:/path`.
        token: sent with each call, over TLS or to this machine only.
        tls: how to speak TLS; None for plain text.
        timeout_s: seconds for each call that names none; None for no limit.
        retries: how often a call is repeated that the server's full queue refused, after as long as the server says, or
            that reached no server; a stream only while nothing of it was received, and never what changes the server.
        max_message_bytes: largest message to send or take.
    """

    def stream(self, prompt: Prompt, *, timeout_s: float | None = None, **knobs: Unpack[GenerationOptions]) -> Stream:
        """Generate, chunk by chunk.

        Args:
            prompt: a text, a list of token ids, or a list of messages.
            timeout_s: see the class.
            knobs: see GenerationOptions.

        Raises:
            TypeError: for an unknown keyword.
            InvalidArgumentError: for values that cannot be sent. What the server refuses is raised by the first `next`.
        """
        request = _convert.generate_stream_request(prompt, knobs)
        method = self._open_stubs().generation.GenerateStream
        metadata = self._connection.metadata
        return Stream(
            lambda remaining_s: method(request, timeout=remaining_s, metadata=metadata),
            self._attempts(timeout_s),
            self._sleep,
        )

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **knobs: Unpack[GenerationOptions]
    ) -> Generation:
        """Generate and return everything at once; arguments as for `stream`."""
        request = _convert.generate_request(prompt, knobs)
        response = self._call(self._open_stubs().generation.Generate, request, timeout_s)
        return _convert.generation_from_proto(response)

    def score(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapter: str | None = None,
        top_logprobs: int | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the model's own log-probability of every token of the prompt; nothing is generated."""
        request = _convert.score_request(prompt, model=model, adapter=adapter, num_top_logprobs=top_logprobs)
        return _convert.score_from_proto(self._call(self._open_stubs().generation.Score, request, timeout_s))

    def tokenize(
        self,
        prompt: str | Sequence[Message | Mapping[str, str]],
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Token, ...]:
        """Return the tokens of a text or of messages; `add_special_tokens` is true when unset, never for messages."""
        request = _convert.tokenize_request(prompt, model=model, add_special_tokens=add_special_tokens)
        return _convert.tokens_from_proto(self._call(self._open_stubs().generation.Tokenize, request, timeout_s))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Return the text of token ids; `special_tokens` shows special tokens in it, false when unset."""
        request = _convert.detokenize_request(token_ids=token_ids, model=model, special_tokens=special_tokens)
        response = self._call(self._open_stubs().generation.Detokenize, request, timeout_s)
        return str(response.text)

    def trace(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        adapter: str | None = None,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Trace:
        """Run one forward pass over a prompt and return its named intermediates, all of them or those asked for.

        Args:
            prompt: a text, a list of token ids, or a list of messages.
            model: name of a served model; may be left out when the server has one only.
            adapter: name of a loaded adapter.
            layers: layers to show, from 0; all when None. What is outside all layers is not affected.
            what: name or names to show; all when None. A name stands for every intermediate that has it as whole dotted
                parts: `logits`, `attention`, `attention.weights`, `q`, `layers.3`; `*` is any text.
            timeout_s: see the class.
        """
        request = _convert.trace_request(prompt, model=model, adapter=adapter, layers=layers, what=what)
        responses = self._call(_collected(self._open_stubs().trace.Trace), request, timeout_s)
        return _convert.trace_from_proto(responses)

    def preview(
        self,
        prompt: Prompt | None = None,
        *,
        logits: Sequence[float] | None = None,
        timeout_s: float | None = None,
        **knobs: Unpack[PreviewOptions],
    ) -> Preview:
        """Run a sampling chain once and return the distribution after every stage.

        Args:
            prompt: what the model continues; a text, a list of token ids, or a list of messages.
            logits: in place of a prompt, the row to start from, one number a token; minus infinity masks a token.
            timeout_s: see the class.
            knobs: see PreviewOptions; only what is given acts.
        """
        request = make_preview_request(prompt, logits, knobs)
        response = self._call(self._open_stubs().trace.PreviewSampling, request, timeout_s)
        return _convert.preview_from_proto(response)

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models."""
        response = self._call(self._open_stubs().model.ListModels, model_pb2.ListModelsRequest(), timeout_s)
        return _convert.models_from_proto(response)

    def get_model(self, model: str | None = None, *, timeout_s: float | None = None) -> Model:
        """Return one served model; the name may be left out when the server has one only."""
        request = _convert.make_request(model_pb2.GetModelRequest, model=model)
        return _convert.model_from_proto(self._call(self._open_stubs().model.GetModel, request, timeout_s).model)

    def load_model(self, source: str, *, name: str | None = None, timeout_s: float | None = None) -> Model:
        """Load a model into the server and return it; it goes on loading when the timeout passes.

        Args:
            source: name of a model in the server's store, or the absolute path of a folder that the server allows.
            name: what requests will call it; the folder's name when None.
            timeout_s: see the class.
        """
        request = _convert.make_request(model_pb2.LoadModelRequest, source=source, model=name)
        return _convert.model_from_proto(self._change(self._open_stubs().model.LoadModel, request, timeout_s).model)

    def unload_model(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model: it takes no new requests, and those under way finish within the server's grace period."""
        request = _convert.make_request(model_pb2.UnloadModelRequest, model=model)
        self._change(self._open_stubs().model.UnloadModel, request, timeout_s)

    def update_weights(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        label: str | None = None,
        expected_version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Replace a model's weights by those of a folder between two steps, and return their version.

        Requests under way finish on the weights they began with.

        Args:
            path: absolute path of the new checkpoint's folder, which the server must allow.
            model: name of a served model; may be left out when the server has one only.
            label: kept with the version, for people.
            expected_version: refuses the update, as a ConflictError, unless this is the version now served.
            timeout_s: see the class.
        """
        request = _convert.make_request(
            model_pb2.UpdateWeightsRequest,
            path=os.fspath(path),
            model=model,
            label=label,
            expected_version=expected_version,
        )
        return int(self._change(self._open_stubs().model.UpdateWeights, request, timeout_s).weight_version)

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Adapter:
        """Load a LoRA adapter, in place of one of the same name; requests under way keep the one they began with.

        Args:
            name: what requests will call it, as `adapter`.
            path: absolute path of its folder, in PEFT's layout, which the server must allow.
            model: name of the model it changes; may be left out when the server has one only.
            timeout_s: see the class.
        """
        request = _convert.make_request(model_pb2.LoadAdapterRequest, adapter=name, path=os.fspath(path), model=model)
        response = self._change(self._open_stubs().model.LoadAdapter, request, timeout_s)
        return _convert.adapter_from_proto(response.adapter)

    def unload_adapter(self, name: str, *, model: str | None = None, timeout_s: float | None = None) -> None:
        """Unload an adapter; requests under way keep it."""
        request = _convert.make_request(model_pb2.UnloadAdapterRequest, adapter=name, model=model)
        self._change(self._open_stubs().model.UnloadAdapter, request, timeout_s)

    def list_adapters(self, *, model: str | None = None, timeout_s: float | None = None) -> tuple[Adapter, ...]:
        """Return the loaded adapters of a model; its name may be left out when the server has one only."""
        request = _convert.make_request(model_pb2.ListAdaptersRequest, model=model)
        response = self._call(self._open_stubs().model.ListAdapters, request, timeout_s)
        return tuple(map(_convert.adapter_from_proto, response.adapters))

    def list_samplers(self, *, timeout_s: float | None = None) -> Samplers:
        """Return the server's sampler stages and plugins."""
        response = self._call(self._open_stubs().sampler.ListSamplers, sampler_pb2.ListSamplersRequest(), timeout_s)
        return _convert.samplers_from_proto(response)

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Return what the server is: its version, features and limits."""
        response = self._call(self._open_stubs().server.GetServerInfo, server_pb2.GetServerInfoRequest(), timeout_s)
        return _convert.server_info_from_proto(response)

    def get_load(self, *, timeout_s: float | None = None) -> tuple[ModelLoad, ...]:
        """Return how busy each model is now."""
        response = self._call(self._open_stubs().server.GetLoad, server_pb2.GetLoadRequest(), timeout_s)
        return _convert.load_from_proto(response)


def _collected(method: Any) -> Callable[..., list[Any]]:
    """Return a method that takes what another one streams all at once."""
    return lambda request, **keywords: list(method(request, **keywords))
