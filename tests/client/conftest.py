"""A real gRPC server on loopback that answers what a test scripts, and clients of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message as ProtoMessage
from google.rpc import status_pb2
from treadle_client import AsyncClient, Client
from treadle_protos.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
)

WAIT_S = 20.0  # far more than any step of these tests takes, on a busy machine too


@dataclass
class Failure(grpc.Status):
    """A status to fail a call with, and the google.rpc details it carries."""

    code: grpc.StatusCode
    details: str = "as scripted"
    detail_messages: tuple[ProtoMessage, ...] = ()
    raw_details: bytes | None = None

    @property
    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata that carries the details."""
        if self.raw_details is not None:
            return (("grpc-status-details-bin", self.raw_details),)
        packed = [any_pb2.Any() for _ in self.detail_messages]
        for target, message in zip(packed, self.detail_messages, strict=True):
            target.Pack(message)
        status = status_pb2.Status(code=self.code.value[0], message=self.details, details=packed)
        return (("grpc-status-details-bin", status.SerializeToString()),)


@dataclass
class Script:
    """What the fake server does next, and what it has seen."""

    failures: deque[Failure] = field(default_factory=deque)  # each fails one call, before anything else
    events: list[ProtoMessage] = field(default_factory=list)  # what a stream sends
    after_events: Failure | None = None  # how a stream ends
    hold: bool = False  # a stream stays open after its events until the client leaves
    replies: dict[str, ProtoMessage] = field(default_factory=dict)
    health: list[bytes | Failure] = field(default_factory=lambda: [b"\x08\x01"])  # the last one is repeated
    requests: list[ProtoMessage] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # an RPC that `hold` kept open has ended

    def begin(self, request: ProtoMessage, context: grpc.ServicerContext) -> None:
        """Record a call, and fail it if the script says so."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            context.abort_with_status(self.failures.popleft())


class FakeServicer(
    generation_pb2_grpc.GenerationServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    sampler_pb2_grpc.SamplerServiceServicer,
    server_pb2_grpc.ServerServiceServicer,
    trace_pb2_grpc.TraceServiceServicer,
):
    """Every service, answering from the script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        unary = ("Generate", "Score", "Tokenize", "Detokenize", "ListModels", "GetModel", "ListSamplers")
        changes = ("LoadModel", "UnloadModel", "UpdateWeights", "LoadAdapter", "UnloadAdapter", "ListAdapters")
        for name in (*unary, *changes, "GetServerInfo", "GetLoad", "PreviewSampling"):
            setattr(self, name, self._reply(name))

    def _reply(self, name: str) -> Callable[[ProtoMessage, grpc.ServicerContext], ProtoMessage]:
        def reply(request: ProtoMessage, context: grpc.ServicerContext) -> ProtoMessage:
            self.script.begin(request, context)
            self._hold(context)
            modules = (generation_pb2, model_pb2, sampler_pb2, server_pb2, trace_pb2)
            empty = next(getattr(m, f"{name}Response") for m in modules if hasattr(m, f"{name}Response"))
            return self.script.replies.get(name, empty())

        return reply

    def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: ProtoMessage, context: grpc.ServicerContext
    ) -> Iterator[ProtoMessage]:
        """Send the events, then hold, fail or end."""
        self.script.begin(request, context)
        if self.script.hold:
            context.add_callback(self.script.left.set)
        yield from self.script.events
        self._hold(context)
        if self.script.after_events is not None:
            context.abort_with_status(self.script.after_events)

    def Trace(self, request: ProtoMessage, context: grpc.ServicerContext) -> Iterator[ProtoMessage]:  # noqa: N802 - too
        """Stream as GenerateStream does."""
        yield from self.GenerateStream(request, context)

    def _hold(self, context: grpc.ServicerContext) -> None:
        if self.script.hold:
            over = threading.Event()
            context.add_callback(self.script.left.set)
            if context.add_callback(over.set):
                over.wait(WAIT_S)

    def health(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer a health check in raw bytes."""
        answer = self.script.health.pop(0) if len(self.script.health) > 1 else self.script.health[0]
        if isinstance(answer, Failure):
            context.abort_with_status(answer)
        return answer


@dataclass
class FakeServer:
    """A running server: its script and its target."""

    script: Script
    target: str


StartServer = Callable[..., FakeServer]
Options = tuple[tuple[str, int], ...]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start fake servers, with TLS credentials when given; they stop after the test."""
    running: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def start(credentials: grpc.ServerCredentials | None = None, options: Options = (), port: int = 0) -> FakeServer:
        pool = ThreadPoolExecutor(max_workers=8)
        server = grpc.server(pool, options=options)
        running.append((server, pool))
        servicer = FakeServicer(Script())
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(servicer, server)
        server_pb2_grpc.add_ServerServiceServicer_to_server(servicer, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
        health = {"Check": grpc.unary_unary_rpc_method_handler(servicer.health)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),))
        address = f"127.0.0.1:{port}"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        server.start()
        return FakeServer(servicer.script, f"127.0.0.1:{port}")

    yield start
    for server, pool in running:
        server.stop(None).wait(WAIT_S)
        pool.shutdown()


@pytest.fixture
def server(start_server: StartServer) -> FakeServer:
    """A fake server without TLS."""
    return start_server()


@pytest.fixture
def script(server: FakeServer) -> Script:
    """What the fake server does and has seen."""
    return server.script


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    """A client of the fake server; no call can hang a test."""
    with Client(server.target, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
async def async_client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    """An asynchronous client of the fake server; no call can hang a test."""
    async with AsyncClient(server.target, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def failure() -> type[Failure]:
    """The class of scripted failures."""
    return Failure


@pytest.fixture
def wait_left(script: Script) -> Callable[[], bool]:
    """Wait until an RPC that the server keeps open has ended, which only the client can do; return whether it did."""
    return lambda: script.left.wait(WAIT_S / 2)


def _delta(index: int, text: str) -> generation_pb2.GenerateStreamResponse:
    return generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta(index=index, text=text))


@pytest.fixture
def story(script: Script) -> Script:
    """The script of a stream that says `cat mouse` and ends by max_tokens."""
    info = generation_pb2.PromptInfo(request_id="r1", model="tiny", seed=7, num_prompt_tokens=3)
    finish = generation_pb2.FinishInfo(index=0, reason=generation_pb2.FINISH_REASON_MAX_TOKENS)
    finish.usage.num_generated_tokens = 2
    script.events = [
        generation_pb2.GenerateStreamResponse(prompt_info=info),
        _delta(0, "cat"),
        _delta(0, " mouse"),
        generation_pb2.GenerateStreamResponse(finish_info=finish),
    ]
    return script
