"""The gRPC server: services, health, reflection, and its life from loading to drained."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
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
    training_pb2,
)

from treadle_server.config import ServerConfig
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.engine.worker import EngineWorker
from treadle_server.language_model import LanguageModel, RequestLimits
from treadle_server.plugins.manager import PluginManager
from treadle_server.service.active_requests import ActiveRequests
from treadle_server.service.generation_servicer import GenerationServicer
from treadle_server.service.interceptor import RequestInterceptor
from treadle_server.service.model_changes import ModelChanges
from treadle_server.service.model_servicer import ModelServicer
from treadle_server.service.observability.engine_metrics import EngineCollector, PluginCollector
from treadle_server.service.observability.server_observability import Observability
from treadle_server.service.sampler_servicer import SamplerServicer
from treadle_server.service.security.allowed_folders import AllowedFolders
from treadle_server.service.security.server_security import ServerSecurity
from treadle_server.service.served_models import ServedModels
from treadle_server.service.server_servicer import ServerServicer
from treadle_server.service.trace_servicer import TraceServicer
from treadle_server.service.training.config import TrainerConfig

_LOG = logging.getLogger(__name__)

_Limits = TypeVar("_Limits", EngineLimits, RequestLimits)

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name,
    server_pb2.DESCRIPTOR.services_by_name["ServerService"].full_name,
    trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name,
)
# The service of a trainer, which may run in a process beside a server.
TRAINING_SERVICE = training_pb2.DESCRIPTOR.services_by_name["TrainingService"].full_name
# Threads that check and tokenise requests; the library releases the interpreter lock while it works.
_NUM_ADMISSION_THREADS = 4
# What finished requests get to send their last message; health watches, which never end by themselves, are cut off.
_LAST_WORDS_S = 0.5


class InferenceServer:
    """Serves models over gRPC. Everything but `load_model` belongs to one event loop.

    It answers health checks from `start` on, with NOT_SERVING until `open` and again from `stop`.
    """

    def __init__(self, config: ServerConfig, plugins: PluginManager) -> None:
        self.config = config
        self.plugins = plugins
        self.models = ServedModels()
        self._worker = EngineWorker()
        self._executor = ThreadPoolExecutor(_NUM_ADMISSION_THREADS, thread_name_prefix="treadle-admission")
        self._health = health.aio.HealthServicer()
        self._active = ActiveRequests()
        self.security = ServerSecurity(config)
        collectors = (EngineCollector(self.models.all), PluginCollector(plugins))
        self.observability = Observability(config, self.security, collectors, generates=True)
        interceptor = RequestInterceptor(
            self._active, self.security, self.observability.telemetry, config.max_request_entries
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=channel_options(config))
        self._add_services()

    def _add_services(self) -> None:
        server = self._server
        generation = GenerationServicer(self.models, self._executor, self.config.max_message_bytes)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        allowed = AllowedFolders(self.config.model_roots)
        self._changes = ModelChanges(self.models, self.load_model, allowed, self.config.grace_s)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self.models, self._changes), server)
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(SamplerServicer(self.models, self.plugins), server)
        server_pb2_grpc.add_ServerServiceServicer_to_server(ServerServicer(self.models, self.config), server)
        trace = TraceServicer(self.models, self.plugins, self._executor, self.config.max_message_bytes)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(trace, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

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

    def load_model(self, source: str, name: str | None = None) -> LanguageModel:
        """Load a model with the server's settings; may run in any thread while the server answers health checks."""
        config = self.config
        return LanguageModel.load(
            source,
            name=name,
            backend=config.backend,
            dtype=config.dtype,
            numerics=config.numerics,
            plugins=self.plugins,
            worker=self._worker,
            engine_limits=_pick(EngineLimits, config),
            request_limits=_pick(RequestLimits, config),
            draft=config.drafts.get(name or ""),
            quantize=config.quantize,
            activations=config.activations,
        )

    async def open(self) -> None:
        """Take requests from now on, and say so to health checks."""
        self.models.open()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, let those under way finish for `grace_s` seconds, then cancel them.

        Until then it listens on, so that health checks get NOT_SERVING and new requests UNAVAILABLE: gRPC's own grace
        period closes the port at once and cancels what arrives at that moment.
        """
        self.models.drain()
        await self._health.enter_graceful_shutdown()
        idle = await self._active.wait_until_idle(self.config.grace_s if grace_s is None else grace_s)
        await self._server.stop(_LAST_WORDS_S if idle else 0)
        self._changes.stop()
        await asyncio.to_thread(self._worker.close)
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self.observability.stop()

    async def report_trainer(self, runs: bool) -> None:
        """Say to health checks of the training service whether the trainer beside this server runs."""
        status = health_pb2.HealthCheckResponse.SERVING if runs else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(TRAINING_SERVICE, status)

    async def _set_health(self, status: int) -> None:
        for service in ("", *SERVICES):
            await self._health.set(service, status)


def _pick(kind: type[_Limits], config: ServerConfig) -> _Limits:
    """Make a limits object from the settings of the same names."""
    names = (field.name for field in dataclasses.fields(kind))
    return kind(**{name: getattr(config, name) for name in names if name in ServerConfig.model_fields})


def channel_options(config: ServerConfig | TrainerConfig) -> list[tuple[str, int]]:
    """Return gRPC's options. It ignores names that it does not know, so a test looks for each one in its library."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Clients ping every 10 s or more to find dead connections, also before they send anything.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", 20_000),  # a connection that never says who it is goes away
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent split of the traffic
    ]
