"""OpenTelemetry traces: a span for each RPC, with the times it waited, read its prompt and wrote.

Spans are made when an RPC has ended, from what was noted meanwhile: nothing is done for them while tokens are made.
Needs the extra `otel`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from treadle_server.errors import ConfigError
from treadle_server.service.observability.call_record import CallRecord
from treadle_server.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

_LOG = logging.getLogger(__name__)
_NS: Final = 1_000_000_000
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# What the caller did is no fault of this server: the convention for servers' spans.
_FAULTS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)  # fmt: skip
_PROPAGATED: Final = ("traceparent", "tracestate")
_FLUSH_MS: Final = 2000


def tracer_for(endpoint: str | None) -> SpanTracer | None:
    """Return what sends traces to a collector over OTLP; None where neither the settings nor OTEL_* name one.

    Raises:
        ConfigError: the settings name one, and the extra is not installed.
    """
    if endpoint is None and not any(map(os.environ.get, _ENDPOINT_VARIABLES)):
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        missing = "traces need the extra otel: pip install 'treadle-server[otel]'"
        if endpoint is not None:
            raise ConfigError(missing)
        _LOG.warning("%s; without it the OTEL_* variables do nothing", missing)
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = None if endpoint is None else not endpoint.startswith("https:")
    return SpanTracer(OTLPSpanExporter(endpoint=endpoint, insecure=insecure))


class SpanTracer:
    """Makes spans and gives them to an exporter, on a thread of its own; sampling follows OTEL_* and the caller's."""

    def __init__(self, exporter: SpanExporter, service_name: str = "treadle") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or service_name
        resource = Resource.create({"service.name": name, "service.version": VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("treadle_server", VERSION)

    def trace(self, call: CallRecord, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Make the spans of an RPC that has ended, under its caller's span if there is one; return the trace's id."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        end_ns = call.started_ns + int(call.duration_s * _NS)
        span = self._tracer.start_span(
            call.method,
            context=_parent(metadata),
            kind=SpanKind.SERVER,
            attributes=_attributes(call),
            start_time=call.started_ns,
        )
        if call.code in _FAULTS:
            span.set_status(Status(StatusCode.ERROR, call.reason or call.code))
        inside = set_span_in_context(span)
        for name, start_ns, stop_ns in _phases(call):
            child = self._tracer.start_span(name, context=inside, start_time=start_ns)
            child.end(end_time=stop_ns)
        span.end(end_time=end_ns)
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what waits, for a moment, and stop."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def _parent(metadata: Sequence[tuple[str, str | bytes]]) -> Context:
    """Return the caller's span by W3C trace context; a malformed one counts for none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in metadata if key in _PROPAGATED and isinstance(value, str)}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _phases(call: CallRecord) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of what a generation went through, as Unix time in nanoseconds."""
    timings, generation = call.timings, call.generation
    if timings is None or generation is None:
        return
    at_s = generation.arrived_s - call.started_s
    bounds_s = [at_s]
    for duration_s in (timings.queue_s, timings.prefill_s, timings.decode_s):
        bounds_s.append(bounds_s[-1] + duration_s)
    bounds_ns = [call.started_ns + int(bound_s * _NS) for bound_s in bounds_s]
    for name, (start_ns, stop_ns) in zip(("queue", "prefill", "decode"), pairwise(bounds_ns), strict=True):
        if stop_ns > start_ns:
            yield name, start_ns, stop_ns


def _attributes(call: CallRecord) -> Mapping[str, str | int | Sequence[str]]:
    """Return what a span says of an RPC, by OpenTelemetry's names where it has some."""
    service, _, method = call.method.partition("/")
    attributes: dict[str, str | int | Sequence[str] | None] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": call.code,
        "error.type": call.reason or None,
        "treadle.request_id": call.request_id,
        "treadle.adapter": call.adapter or None,
        "treadle.weight_version": call.weight_version or None,
        "gen_ai.request.model": call.model or None,
        "gen_ai.usage.input_tokens": call.num_prompt_tokens,
        "gen_ai.usage.output_tokens": call.num_generated_tokens,
        "gen_ai.response.finish_reasons": call.finish_reasons or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}
