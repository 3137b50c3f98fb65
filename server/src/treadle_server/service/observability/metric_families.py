"""Makes Prometheus metrics of plain counts and durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from treadle_server.engine.statistics import DurationHistogram

_Key = TypeVar("_Key", bound=tuple[str, ...])


def counter(name: str, text: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    """Return a counter with a value for each combination of labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    """Return a gauge with a value for each combination of labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def histogram(name: str, text: str, label: str, values: Mapping[str, DurationHistogram]) -> Metric:
    """Return a histogram of durations for each value of a label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, durations in sorted(values.items()):
        bounds = [*map(str, durations.bounds_s), "+Inf"]
        family.add_metric([value], list(zip(bounds, durations.cumulative(), strict=True)), durations.sum_s)
    return family
