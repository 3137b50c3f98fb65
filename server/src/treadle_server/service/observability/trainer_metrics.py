"""Metrics of a trainer, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from treadle_protos.v1 import training_pb2 as pb

from treadle_server.service.training.metrics import MetricsLog, StepMetrics
from treadle_server.service.training.worker import TrainerWorker

_OF_STEP: Final[tuple[tuple[str, str, Callable[[StepMetrics], float]], ...]] = (
    ("treadle_trainer_step", "Number of the newest step", lambda m: m.step),
    ("treadle_trainer_loss", "Loss of the newest step", lambda m: m.loss),
    ("treadle_trainer_gradient_norm", "Norm of its gradient before clipping", lambda m: m.grad_norm),
    ("treadle_trainer_learning_rate", "Its learning rate", lambda m: m.lr),
    ("treadle_trainer_tokens_per_second", "Tokens a second of the newest step", lambda m: m.tokens_per_s),
)


class TrainerCollector(Collector):
    """Makes the metrics of one trainer. May be asked in any thread.

    Args:
        log: the figures of its steps.
        worker: what its calls wait for.
        published: returns what was published last, None before that.
    """

    def __init__(self, log: MetricsLog, worker: TrainerWorker, published: Callable[[], pb.Publication | None]) -> None:
        self._log = log
        self._worker = worker
        self._published = published

    def collect(self) -> Iterator[Metric]:
        """Yield each metric; those of a step have no value before the first one."""
        newest, published = self._log.newest, self._published()
        yield CounterMetricFamily("treadle_trainer_steps", "Steps since the start", value=self._log.num_steps)
        yield CounterMetricFamily("treadle_trainer_tokens", "Tokens of those steps", value=self._log.num_tokens)
        yield GaugeMetricFamily("treadle_trainer_calls", "Calls that run or wait", value=self._worker.num_calls)
        for name, text, read in _OF_STEP:
            yield GaugeMetricFamily(name, text, value=None if newest is None else read(newest))
        yield _version("treadle_trainer_published_weight_version", "Version that the server gave", published)
        yield _version("treadle_trainer_published_adapter_version", "The same of an adapter", published)


def _version(name: str, text: str, published: pb.Publication | None) -> Metric:
    field = "adapter_version" if "adapter" in name else "weight_version"
    return GaugeMetricFamily(name, text, value=None if published is None else getattr(published, field))
