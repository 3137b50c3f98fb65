"""SamplerService: lists the sampler stages and the plugins that bring them."""

from __future__ import annotations

import json
from collections import Counter

import grpc
from treadle_protos.v1 import sampler_pb2 as pb
from treadle_protos.v1 import sampler_pb2_grpc

from treadle_server.plugins.manager import PluginManager
from treadle_server.service.served_models import ServedModels


class SamplerServicer(sampler_pb2_grpc.SamplerServiceServicer):
    """Answers from what the plugin manager loaded, and from what the engines saw of it."""

    def __init__(self, models: ServedModels, plugins: PluginManager) -> None:
        self._models = models
        self._plugins = plugins

    async def ListSamplers(
        self, request: pb.ListSamplersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSamplersResponse:
        """List every stage, and every plugin with its status."""
        num_slow_calls: Counter[str] = Counter()
        for model in self._models.all():
            num_slow_calls.update(model.engine.stage_monitor.num_slow_calls)
        stages = [
            pb.Sampler(
                name=entry.name,
                kind=f"SAMPLER_KIND_{entry.kind.upper()}",
                plugin=entry.plugin,
                parameters_json_schema=json.dumps(entry.schema(), ensure_ascii=False),
                summary=entry.doc,
                num_slow_calls=num_slow_calls[entry.name],
            )
            for entry in self._plugins.registry.entries()
        ]
        plugins = [
            pb.Plugin(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                status=f"PLUGIN_STATUS_{plugin.status.upper().replace(' ', '_')}",
                reason=plugin.reason,
                stages=[stage.name for stage in plugin.stages],
                families=plugin.families,
                losses=[loss.name for loss in plugin.losses],
                optimizers=[optimizer.name for optimizer in plugin.optimizers],
                backends=[backend.name for backend in plugin.backends],
            )
            for plugin in self._plugins.plugins
        ]
        return pb.ListSamplersResponse(samplers=stages, plugins=plugins)
