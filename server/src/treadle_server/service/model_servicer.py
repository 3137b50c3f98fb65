"""ModelService: lists the served models. Loading and updating them while serving is not there yet."""

from __future__ import annotations

import grpc
from treadle_protos.v1 import model_pb2 as pb
from treadle_protos.v1 import model_pb2_grpc

from treadle_server.errors import NotSupportedError
from treadle_server.service.convert import model_to_proto
from treadle_server.service.served_models import ServedModels


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from the models that are loaded."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """List the served models."""
        return pb.ListModelsResponse(models=[model_to_proto(model) for model in self._models.all()])

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """Describe one served model."""
        return pb.GetModelResponse(model=model_to_proto(self._models.get(request.model)))

    async def LoadModel(self, request: pb.LoadModelRequest, context: grpc.aio.ServicerContext) -> pb.LoadModelResponse:
        """Refuse: models are named when the server starts."""
        raise NotSupportedError("models cannot be loaded while the server runs; name them to `treadle serve`")

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadModelResponse:
        """Refuse: models stay until the server stops."""
        raise NotSupportedError("models cannot be unloaded while the server runs")

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        """Refuse: weights stay as they were loaded."""
        raise NotSupportedError("weights cannot be updated while the server runs")

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Refuse: there are no adapters."""
        raise NotSupportedError("this server has no adapters")

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Refuse: there are no adapters."""
        raise NotSupportedError("this server has no adapters")

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        """Refuse: there are no adapters."""
        raise NotSupportedError("this server has no adapters")
