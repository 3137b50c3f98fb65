"""What a server shows of itself: metrics on a port of their own, traces, and a log line for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from treadle_server.config import ObservedConfig
from treadle_server.service.observability.metric_families import gauge
from treadle_server.service.observability.metrics_server import MetricsServer
from treadle_server.service.observability.rpc_metrics import GenerationMetrics, RpcMetrics
from treadle_server.service.observability.spans import tracer_for
from treadle_server.service.observability.telemetry import Telemetry
from treadle_server.service.security.server_security import ServerSecurity
from treadle_server.version import VERSION


class Observability:
    """The metrics, traces and request log of one server.

    Attributes:
        registry: holds every metric of this server.
        telemetry: what watches its RPCs.

    Raises:
        ConfigError: traces are wanted, and the extra for them is not installed.
    """

    def __init__(
        self, config: ObservedConfig, security: ServerSecurity, collectors: Iterable[Collector], *, generates: bool
    ) -> None:
        self.registry = CollectorRegistry()
        self._config = config
        self._security = security
        self._tracer = tracer_for(config.otlp_endpoint)
        self._metrics: MetricsServer | None = None
        ProcessCollector(registry=self.registry)
        rpcs, generations = RpcMetrics(), GenerationMetrics()
        for collector in (_Build(), *collectors, rpcs, *((generations,) if generates else ())):
            self.registry.register(collector)
        self.telemetry = Telemetry(rpcs, (generations,) if generates else (), self._tracer)

    @property
    def metrics_url(self) -> str | None:
        """Where the metrics are; None while they are nowhere."""
        return None if self._metrics is None else self._metrics.url

    def start(self) -> None:
        """Serve metrics, if there is a port for them.

        Raises:
            ConfigError: the port is taken.
        """
        if self._config.metrics_port is not None:
            self._metrics = MetricsServer(self.registry, self._config, self._config.metrics_port, self._security)

    async def stop(self) -> None:
        """Send the last traces and serve no more metrics."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None


class _Build(Collector):
    """Tells the version."""

    def collect(self) -> Iterator[Metric]:
        yield gauge("treadle_build", "1; the label is the version", ("version",), {(VERSION,): 1})
