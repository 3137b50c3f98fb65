"""The trainer's gRPC server: its service, health, reflection, and its life from loading to drained."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from treadle_protos.v1 import training_pb2_grpc

from treadle_server.service.active_requests import ActiveRequests
from treadle_server.service.app import TRAINING_SERVICE, channel_options
from treadle_server.service.interceptor import RequestInterceptor
from treadle_server.service.observability.server_observability import Observability
from treadle_server.service.observability.trainer_metrics import TrainerCollector
from treadle_server.service.security.server_security import ServerSecurity
from treadle_server.service.training.config import TrainerConfig
from treadle_server.service.training.loading import LoadedTrainer, load_trainer
from treadle_server.service.training.metrics import MetricsLog, StepMetrics
from treadle_server.service.training.servicer import TrainingServicer
from treadle_server.service.training.worker import TrainerWorker

_LOG = logging.getLogger(__name__)

# Threads that check and tokenise batches.
_NUM_ADMISSION_THREADS = 2
# What finished calls get to send their answer; health watches, which never end by themselves, are cut off.
_LAST_WORDS_S = 0.5


class TrainerServer:
    """Trains one model over gRPC. Everything but `load` belongs to one event loop, the one it is made on.

    It answers health checks from `start` on, with NOT_SERVING until `open` and again from `stop`.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.security = ServerSecurity(config)
        self._loop = asyncio.get_running_loop()
        self._metrics = MetricsLog(config.max_metrics)
        self._executor = ThreadPoolExecutor(_NUM_ADMISSION_THREADS, thread_name_prefix="treadle-admission")
        self._loaded: LoadedTrainer | None = None
        self._worker = TrainerWorker(config.max_queued_calls)
        self._servicer = TrainingServicer(self._executor, self._worker, self._metrics)
        self._health = health.aio.HealthServicer()
        self._active = ActiveRequests()
        collector = TrainerCollector(self._metrics, self._worker, self._servicer.last_publication)
        self.observability = Observability(config, self.security, (collector,), generates=False)
        interceptor = RequestInterceptor(
            self._active, self.security, self.observability.telemetry, config.max_request_entries
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=channel_options(config))
        training_pb2_grpc.add_TrainingServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (TRAINING_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address is taken or cannot be listened on.
        """
        port = self.security.add_port(self._server, self.config.port)
        self.observability.start()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        return port

    def load(self, model: str) -> LoadedTrainer:
        """Load the model; may run in any thread while the server answers health checks."""
        return load_trainer(model, self.config, self._report)

    def _report(self, metrics: StepMetrics) -> None:
        """Pass a step's figures on from the trainer's thread; nobody reads them once the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._metrics.add, metrics)

    async def open(self, loaded: LoadedTrainer) -> None:
        """Take calls from now on, and say so to health checks."""
        self._loaded = loaded
        self._servicer.open(loaded)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, let those under way finish for `grace_s` seconds, then cancel them.

        A call that runs on the trainer's thread ends in any case, so that no save stops half way.
        """
        self._servicer.drain()
        await self._health.enter_graceful_shutdown()
        idle = await self._active.wait_until_idle(self.config.grace_s if grace_s is None else grace_s)
        await self._server.stop(_LAST_WORDS_S if idle else 0)
        self._tell_lost_steps()
        self._worker.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self.observability.stop()

    def _tell_lost_steps(self) -> None:
        lost = range(0) if self._loaded is None else self._loaded.steps_kept_nowhere
        if len(lost) == 1:
            _LOG.warning("step %d was kept nowhere", lost[0])
        elif lost:
            _LOG.warning("steps %d-%d were kept nowhere", lost[0], lost[-1])

    async def _set_health(self, status: int) -> None:
        for service in ("", TRAINING_SERVICE):
            await self._health.set(service, status)
