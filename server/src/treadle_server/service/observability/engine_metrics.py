"""Metrics of the engines, read when somebody asks for them: nothing is done for them while tokens are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from treadle_server.engine.load import EngineLoad
from treadle_server.engine.prefix_cache import PrefixCache
from treadle_server.engine.statistics import DurationHistogram, EngineStatistics
from treadle_server.language_model import LanguageModel
from treadle_server.plugins.manager import PluginManager
from treadle_server.service.observability.metric_families import counter, gauge, histogram


@dataclass(frozen=True, slots=True)
class _View:
    """What one model's metrics are read from."""

    model: LanguageModel
    load: EngineLoad

    @property
    def statistics(self) -> EngineStatistics:
        return self.model.engine.statistics

    @property
    def prefixes(self) -> PrefixCache:
        return self.model.engine.scheduler.prefix_cache


_Read = Callable[[_View], float]

_GAUGES: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("treadle_queue_requests", "Requests that wait for their first step", lambda v: v.load.num_waiting_requests),
    ("treadle_queue_tokens", "Prompt tokens of those requests", lambda v: v.load.num_waiting_tokens),
    ("treadle_running_sequences", "Sequences that hold memory", lambda v: v.load.num_running_sequences),
    ("treadle_paused_sequences", "Sequences whose readers lag behind", lambda v: v.load.num_paused_sequences),
    ("treadle_kv_bytes", "Memory of keys and values", lambda v: v.load.kv_cache_bytes),
    ("treadle_kv_limit_bytes", "Memory that keys and values may take", lambda v: v.load.max_kv_cache_bytes),
    ("treadle_prefix_cache_bytes", "Memory of the prefix cache", lambda v: v.prefixes.num_bytes),
    ("treadle_prefix_cache_limit_bytes", "Memory that the prefix cache may take", lambda v: v.prefixes.max_bytes),
    ("treadle_weight_version", "Version of the weights that new requests get", lambda v: v.model.weight_version),
    ("treadle_weight_versions", "Versions of the weights in memory", lambda v: v.load.num_weight_versions),
    ("treadle_adapters", "Adapters that requests may name", lambda v: len(v.model.adapters)),
)
_COUNTERS: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("treadle_prompt_tokens", "Prompt tokens of requests that have begun", lambda v: v.statistics.num_prompt_tokens),
    ("treadle_generated_tokens", "Tokens sampled", lambda v: v.load.num_generated_tokens),
    ("treadle_drafted_tokens", "Tokens drafted by speculation", lambda v: v.statistics.num_draft_tokens),
    ("treadle_accepted_tokens", "Drafted tokens that were sampled", lambda v: v.statistics.num_accepted_tokens),
    (
        "treadle_prefix_cache_queried_tokens",
        "Tokens looked for in the prefix cache",
        lambda v: v.prefixes.num_queried_tokens,
    ),
    (
        "treadle_prefix_cache_hit_tokens",
        "Cached tokens: found there, and so not computed",
        lambda v: v.prefixes.num_hit_tokens,
    ),
    (
        "treadle_preemptions",
        "Times that a sequence lost its memory and was put back in line",
        lambda v: v.statistics.num_preemptions,
    ),
    ("treadle_forward_passes", "Runs of the model", lambda v: v.statistics.forward.num_runs),
    ("treadle_forward_seconds", "Time in the model", lambda v: v.statistics.forward.total_s),
    ("treadle_sampler_seconds", "Time in sampling chains", lambda v: v.statistics.sampler.total_s),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[EngineStatistics], DurationHistogram]], ...]] = (
    ("treadle_queue_seconds", "Time from a request's arrival to its first step", lambda s: s.queue),
    ("treadle_first_token_seconds", "Time from a request's arrival to its first token", lambda s: s.first_token),
    ("treadle_inter_token_seconds", "Time between two tokens of a choice", lambda s: s.inter_token),
)


class EngineCollector(Collector):
    """Makes the metrics of all served models. May be asked in any thread.

    A model's counters begin at 0 when it is loaded, also when it was loaded before.
    """

    def __init__(self, models: Callable[[], Iterable[LanguageModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with a value for every model."""
        views = {model.name: _View(model, model.engine.load()) for model in self._models()}
        for name, text, read in _GAUGES:
            yield gauge(name, text, ("model",), {(model,): read(view) for model, view in views.items()})
        for name, text, read in _COUNTERS:
            yield counter(name, text, ("model",), {(model,): read(view) for model, view in views.items()})
        for name, text, of in _HISTOGRAMS:
            yield histogram(name, text, "model", {model: of(view.statistics) for model, view in views.items()})
        slow = {
            (model, stage): count
            for model, view in views.items()
            for stage, count in view.model.engine.stage_monitor.num_slow_calls.items()
        }
        yield counter("treadle_slow_stage_calls", "Calls of stages that took too long", ("model", "stage"), slow)


class PluginCollector(Collector):
    """Counts the plugins by what became of them."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins

    def collect(self) -> Iterator[Metric]:
        """Yield how many plugins are active, blocked, not installed, and failed."""
        states = Counter((plugin.status,) for plugin in self._plugins.plugins)
        yield gauge("treadle_plugins", "Plugins by state", ("state",), states)
