"""Metrics of RPCs and of what they ask for, counted once when each has ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from treadle_server.engine.statistics import DurationHistogram
from treadle_server.service.observability.call_record import CallRecord
from treadle_server.service.observability.metric_families import counter, gauge, histogram

_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_AUTH_CODES: Final = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
# What a generation came to, by the status it ended with; any other status is a failure.
_OUTCOMES: Final = {
    "OK": "finished",
    "CANCELLED": "cancelled",
    "DEADLINE_EXCEEDED": "deadline",
    "INVALID_ARGUMENT": "refused",
    "RESOURCE_EXHAUSTED": "refused",
    "UNAVAILABLE": "refused",
}
_NON_FINITE: Final = "NON_FINITE_LOGITS"


def _durations() -> defaultdict[str, DurationHistogram]:
    return defaultdict(partial(DurationHistogram, _BOUNDS_S))


class RpcMetrics(Collector):
    """Counts RPCs on the event loop; any thread may collect. Labels hold names of ours only, none of a caller's."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._seconds = _durations()

    def began(self) -> None:
        """Count an RPC that begins."""
        self._num_under_way += 1

    def ended(self, call: CallRecord) -> None:
        """Count an RPC that has ended."""
        self._num_under_way -= 1
        self._ended[call.method, call.code] += 1
        self._seconds[call.method].add(call.duration_s)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        ended = self._ended.copy()
        refused = Counter({(code,): 0 for code in _AUTH_CODES})
        for (_, code), count in ended.items():
            if code in _AUTH_CODES:
                refused[code,] += count
        yield gauge("treadle_rpcs_under_way", "RPCs that run now", (), {(): self._num_under_way})
        yield counter("treadle_rpcs", "RPCs that have ended", ("method", "code"), ended)
        yield histogram("treadle_rpc_seconds", "Time that RPCs took", "method", self._seconds.copy())
        yield counter("treadle_auth_failures", "RPCs of callers who may not call", ("code",), refused)


class GenerationMetrics(Collector):
    """Counts generations by what became of them, on the event loop; any thread may collect."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._choices: Counter[tuple[str, ...]] = Counter()
        self._stage_failures: Counter[tuple[str, ...]] = Counter()
        self._corrupted: Counter[tuple[str, ...]] = Counter()
        self._seconds = _durations()

    def ended(self, call: CallRecord) -> None:
        """Count what an RPC that has ended says of a model."""
        if not call.model:
            return
        if call.stage is not None:
            self._stage_failures[call.model, *call.stage] += 1
        if call.reason == _NON_FINITE:
            self._corrupted[call.model,] += 1
        if call.generates_text:
            self._requests[call.model, _OUTCOMES.get(call.code, "failed")] += 1
            self._seconds[call.model].add(call.duration_s)
            self._choices.update((call.model, reason) for reason in call.finish_reasons)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        by_outcome = "Generations by outcome: finished, refused, failed, cancelled (the client went away), deadline"
        yield counter("treadle_requests", by_outcome, ("model", "outcome"), self._requests.copy())
        by_reason = "Choices by the reason why they ended"
        yield counter("treadle_choices", by_reason, ("model", "reason"), self._choices.copy())
        whole = "Time from a generation's arrival to its last message"
        yield histogram("treadle_request_seconds", whole, "model", self._seconds.copy())
        failures, labels = self._stage_failures.copy(), ("model", "plugin", "stage")
        yield counter("treadle_stage_failures", "Requests that a sampler stage ended", labels, failures)
        corrupted = "Requests that ended because the model's numbers were not finite"
        yield counter("treadle_corrupted_requests", corrupted, ("model",), self._corrupted.copy())
