"""Watches RPCs: gives each its id and, when it has ended, tells the log, the metrics and the traces."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import grpc

from treadle_server.service.observability.call_record import (
    REQUEST_ID_KEY,
    CallRecord,
    make_current,
    sane_request_id,
)
from treadle_server.service.status import ended_with

_LOG = logging.getLogger("treadle_server.requests")
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")  # visible ASCII without quotes, backslashes and equals signs
_FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN"})
_IN_FRONT: Final = frozenset({"method", "code"})  # a line of text begins with them


class CallObserver(Protocol):
    """Something that counts or shows RPCs."""

    def ended(self, call: CallRecord) -> None:
        """Take an RPC that has ended."""


class Tracer(Protocol):
    """Something that makes traces of RPCs."""

    def trace(self, call: CallRecord, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Take an RPC that has ended, with the metadata it came with; return the id of its trace."""


class RpcCounter(CallObserver, Protocol):
    """Something that also wants to know when an RPC begins."""

    def began(self) -> None:
        """Count an RPC that begins."""


class Telemetry:
    """What a server tells of its RPCs. Belongs to one event loop."""

    def __init__(self, rpcs: RpcCounter, observers: Sequence[CallObserver] = (), tracer: Tracer | None = None) -> None:
        self._rpcs = rpcs
        self._observers = (rpcs, *observers)
        self._tracer = tracer

    @contextmanager
    def watch(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[CallRecord]:
        """Lend the record of an RPC while it runs; its id goes back to the client as trailing metadata."""
        metadata = tuple(context.invocation_metadata() or ())
        given = next((value for key, value in metadata if key == REQUEST_ID_KEY), None)
        call = CallRecord(request_id=sane_request_id(given), method=_short(method))
        make_current(call)
        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        self._rpcs.began()
        failure: BaseException | None = None
        try:
            yield call
        except BaseException as error:
            failure = error
            raise
        finally:
            call.duration_s = time.monotonic() - call.started_s
            call.code = ended_with(context, failure)
            self._tell(call, metadata)

    def _tell(self, call: CallRecord, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        if self._tracer is not None:
            call.trace_id = self._tracer.trace(call, metadata)
        for observer in self._observers:
            observer.ended(call)
        level = logging.ERROR if call.code in _FAULTS else logging.INFO
        if _LOG.isEnabledFor(level):
            facts = call_facts(call)
            text = " ".join(f"{name}={_written(value)}" for name, value in facts.items() if name not in _IN_FRONT)
            summary = f"{call.method} {call.code}"
            _LOG.log(level, "%s: %s", summary, text, extra={"facts": facts, "summary": summary})


def call_facts(call: CallRecord) -> dict[str, object]:
    """Return what the log says of an RPC; what does not apply to it is left out."""
    timings = call.timings
    facts: dict[str, object | None] = {
        "request_id": call.request_id,
        "method": call.method,
        "code": call.code,
        "reason": call.reason or None,
        "client": call.client or None,
        "role": call.role or None,
        "model": call.model or None,
        "adapter": call.adapter or None,
        "adapter_version": call.adapter_version or None,
        "weight_version": call.weight_version or None,
        "plugin": call.stage and call.stage[0],
        "stage": call.stage and call.stage[1],
        "prompt_tokens": call.num_prompt_tokens,
        "generated_tokens": call.num_generated_tokens,
        "finish_reasons": list(call.finish_reasons) or None,
        **call.figures,
        "queue_s": timings and round(timings.queue_s, 6),
        "prefill_s": timings and round(timings.prefill_s, 6),
        "decode_s": timings and round(timings.decode_s, 6),
        "duration_s": round(call.duration_s, 6),
        "trace_id": call.trace_id or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _written(value: object) -> str:
    """Return a value for a line of text: one word, whatever is in it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _short(method: str) -> str:
    """Return GenerationService/Generate for /treadle_protos.v1.GenerationService/Generate."""
    service, _, name = method.removeprefix("/").rpartition("/")
    return f"{service.rpartition('.')[2]}/{name}"
