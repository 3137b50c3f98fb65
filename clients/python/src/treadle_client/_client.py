"""The synchronous client. `_async_client` has the same methods with `await`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc
from treadle_protos.v1 import model_pb2, sampler_pb2, server_pb2

from treadle_client import _convert
from treadle_client._channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    Connection,
    Stubs,
    TlsOptions,
    says_serving,
)
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
from treadle_client._stream import Stream

POLL_S: Final = 0.1  # how often `wait_ready` asks a server that is loading


class Client:
    """A connection to a treadle server; use it as a context manager, or close it. Threads may share it.

    Every call takes `timeout_s`: seconds for it, retries included; None takes the client's own, infinity sets no limit.

    Args:
        target: host:port of the server, or another gRPC target such as `unix:/path`.
        token: sent with each call, over TLS or to this machine only.
        tls: how to speak TLS; None for plain text.
        timeout_s: seconds for each call that names none; None for no limit.
        retries: how often a call is repeated that the server's full queue refused, after as long as the server says, or
            that reached no server; a stream only while nothing of it was received.
        max_message_bytes: largest message to send or take.
    """

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
        self._sleep = time.sleep
        self._closed = False
        self._channel: Any = self._connection.open(grpc)
        self._stubs = Stubs(self._channel)

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
        request = _convert.get_model_request(model=model)
        return _convert.model_from_proto(self._call(self._open_stubs().model.GetModel, request, timeout_s).model)

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

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Call a unary RPC, again where the server asks for it."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.remaining_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, attempts.timeout_s)
                delay_s = attempts.next_delay_s(failure)
                if delay_s is None:
                    raise failure from error
            self._sleep(delay_s)

    def _is_serving(self, attempts: Attempts) -> bool:
        try:
            reply = self._open_stubs().health_check(
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


def _collected(method: Any) -> Callable[..., list[Any]]:
    """Return a method that takes what another one streams all at once."""
    return lambda request, **keywords: list(method(request, **keywords))
