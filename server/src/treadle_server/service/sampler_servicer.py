"""SamplerService: lists the sampler stages and the plugins that bring them."""

from __future__ import annotations

import json

import grpc
from treadle_protos.v1 import sampler_pb2 as pb
from treadle_protos.v1 import sampler_pb2_grpc

from treadle_server.plugins.manager import PluginManager


class SamplerServicer(sampler_pb2_grpc.SamplerServiceServicer):
    """Answers from what the plugin manager loaded."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins

    async def ListSamplers(
        self, request: pb.ListSamplersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSamplersResponse:
        """List every stage, and every plugin with its status."""
        stages = [
            pb.Sampler(
                name=entry.name,
                kind=f"SAMPLER_KIND_{entry.kind.upper()}",
                plugin=entry.plugin,
                parameters_json_schema=json.dumps(entry.schema(), ensure_ascii=False),
                summary=entry.doc,
            )
            for entry in self._plugins.registry.entries()
        ]
        plugins = [
            pb.Plugin(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                status=f"PLUGIN_STATUS_{plugin.status.upper()}",
                reason=plugin.reason,
                stages=[stage.name for stage in plugin.stages],
            )
            for plugin in self._plugins.plugins
        ]
        return pb.ListSamplersResponse(samplers=stages, plugins=plugins)
