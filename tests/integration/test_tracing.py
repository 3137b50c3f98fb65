"""OpenTelemetry spans of RPCs: from a server, through a tracer, to an exporter in memory and to a collector's door."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from treadle_client import AsyncClient
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc
from treadle_server.config import ServerConfig
from treadle_server.errors import ConfigError
from treadle_server.plugins import PluginManager
from treadle_server.service.app import InferenceServer
from treadle_server.service.observability import server_observability
from treadle_server.service.observability.spans import SpanTracer, tracer_for

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the cat's own secret"


@asynccontextmanager
async def traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, InMemorySpanExporter]]:
    """A server whose spans stay in memory, and its address."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(server_observability, "tracer_for", lambda endpoint: SpanTracer(exporter))
    server = InferenceServer(ServerConfig(port=0), PluginManager.load())
    target = f"127.0.0.1:{await server.start()}"
    server.models.add(await asyncio.to_thread(server.load_model, str(folder), "tiny"))
    await server.open()
    try:
        yield target, exporter
    finally:
        await server.stop(0)


async def generate(target: str, *metadata: tuple[str, str], **spec: Any) -> None:
    """Generate with metadata of one's own; errors are for the spans to tell."""
    request = pb.GenerateRequest(spec=pb.GenerationSpec(**{"text": SECRET, **spec}))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            await stub.Generate(request, metadata=metadata)
        except grpc.RpcError:
            return


async def spans_of(folder: Path, monkeypatch: Any, *metadata: tuple[str, str], **spec: Any) -> dict[str, ReadableSpan]:
    """The spans of one generation, by name, once the server has sent all."""
    async with traced(folder, monkeypatch) as (target, exporter):
        await generate(target, *metadata, **spec)
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_generation_is_a_span_with_its_phases(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue, prefill and decode lie within the RPC, one after the other; its attributes hold no text."""
    spec = {"stopping": pb.StoppingOptions(max_tokens=5, ignore_eos=True)}
    spans = await spans_of(tiny_folder, monkeypatch, ("x-request-id", "mine"), **spec)
    whole, phases = spans["GenerationService/Generate"], [spans[name] for name in ("queue", "prefill", "decode")]
    assert whole.attributes["treadle.request_id"] == "mine"
    assert whole.attributes["gen_ai.request.model"] == "tiny"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("max_tokens",)
    assert whole.attributes["rpc.grpc.status_code"] == "OK"
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    edges = [whole.start_time, *(edge for span in phases for edge in (span.start_time, span.end_time)), whole.end_time]
    assert edges == sorted(edges)
    assert SECRET not in "".join(span.to_json() for span in spans.values())


async def test_the_callers_trace_goes_on(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The span of an RPC is a child of the one that W3C traceparent names."""
    spans = await spans_of(tiny_folder, monkeypatch, ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"))
    whole = spans["GenerationService/Generate"]
    assert f"{whole.context.trace_id:032x}" == TRACE_ID
    assert f"{whole.parent.span_id:016x}" == PARENT_ID


async def test_unsampled_and_broken_parents(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that samples nothing gets no spans; a malformed header starts a trace of its own."""
    assert not await spans_of(tiny_folder, monkeypatch, ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"))
    spans = await spans_of(tiny_folder, monkeypatch, ("traceparent", "00-" + "z" * 60))
    assert spans["GenerationService/Generate"].parent is None


async def test_a_callers_mistake_is_no_error_of_the_server(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The span tells the code and the reason, and its status stays unset."""
    spans = await spans_of(tiny_folder, monkeypatch, text="", token_ids=pb.TokenIds(ids=[10**6]))
    span = spans["GenerationService/Generate"]
    assert span.attributes["rpc.grpc.status_code"] == "INVALID_ARGUMENT"
    assert span.attributes["error.type"] == "INVALID_REQUEST"
    assert span.status.status_code is StatusCode.UNSET


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what an OTLP exporter sends."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Export(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802 - the RPC's name
        """Keep the names of spans."""
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        self.names += [span.name for scope in scopes for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector(tiny_folder: Path) -> None:
    """The setting names a collector, which has got everything when the server has stopped."""
    collector, door = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, door)
    port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    config = ServerConfig(port=0, otlp_endpoint=f"http://127.0.0.1:{port}")
    server = InferenceServer(config, PluginManager.load())
    target = f"127.0.0.1:{await server.start()}"
    await server.open()
    async with AsyncClient(target) as client:
        await client.server_info()
    await server.stop(0)
    await door.stop(0)
    assert collector.names == ["ServerService/GetServerInfo"]


def test_without_the_extra_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting that cannot be followed is an error, a variable of the environment a warning."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert tracer_for(None) is None
    with pytest.raises(ConfigError, match=r"treadle-server\[otel\]"):
        tracer_for("http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    assert tracer_for(None) is None
    assert "treadle-server[otel]" in caplog.text
