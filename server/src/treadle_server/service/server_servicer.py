"""ServerService: what the server is, and how busy."""

from __future__ import annotations

import time

import grpc
from treadle_protos.v1 import server_pb2 as pb
from treadle_protos.v1 import server_pb2_grpc

from treadle_server.config import ServerConfig
from treadle_server.language_model import LanguageModel
from treadle_server.service.convert import duration_to_proto
from treadle_server.service.served_models import ServedModels
from treadle_server.version import VERSION

_PROTOCOL_VERSION = "v1"
_CAPABILITIES = (
    "adapters",
    "chat",
    "logprobs",
    "model_loading",
    "preview",
    "prompt_logprobs",
    "sampler_plugins",
    "score",
    "stream",
    "trace",
    "weight_updates",
)


class ServerServicer(server_pb2_grpc.ServerServiceServicer):
    """Answers from the configuration and the engines."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config
        self._started_s = time.monotonic()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Return what does not change while the server runs."""
        config = self._config
        return pb.GetServerInfoResponse(
            version=VERSION,
            protocol_version=_PROTOCOL_VERSION,
            capabilities=_CAPABILITIES,
            limits=pb.Limits(
                max_message_bytes=config.max_message_bytes,
                max_queued_requests=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                max_choices=config.max_choices,
                max_top_logprobs=config.max_top_logprobs,
                max_stop_sequences=config.max_stop_sequences,
                max_trace_tokens=config.max_trace_tokens,
                max_trace_bytes=config.max_trace_bytes,
            ),
            uptime=duration_to_proto(time.monotonic() - self._started_s),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        """Return how busy each model is."""
        return pb.GetLoadResponse(models=[_load(model) for model in self._models.all()])


def _load(model: LanguageModel) -> pb.ModelLoad:
    load = model.engine.load()
    return pb.ModelLoad(
        model=model.name,
        num_waiting_requests=load.num_waiting_requests,
        num_waiting_tokens=load.num_waiting_tokens,
        num_running_sequences=load.num_running_sequences,
        kv_cache_bytes=load.kv_cache_bytes,
        max_kv_cache_bytes=load.max_kv_cache_bytes,
        num_generated_tokens=load.num_generated_tokens,
        num_weight_versions=load.num_weight_versions,
        num_paused_sequences=load.num_paused_sequences,
        num_preempted_sequences=load.num_preempted_sequences,
        num_preemptions=load.num_preemptions,
        prefix_cache_bytes=load.prefix_cache_bytes,
        max_prefix_cache_bytes=load.max_prefix_cache_bytes,
        num_prefix_hit_tokens=load.num_prefix_hit_tokens,
        num_prefix_queried_tokens=load.num_prefix_queried_tokens,
    )
