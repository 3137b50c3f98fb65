"""ModelService: lists the served models, loads, updates and unloads them."""

from __future__ import annotations

import grpc
from treadle_protos.v1 import model_pb2 as pb
from treadle_protos.v1 import model_pb2_grpc

from treadle_server.service.convert import adapter_to_proto, model_to_proto
from treadle_server.service.model_changes import ModelChanges
from treadle_server.service.served_models import ServedModels


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from the models that are loaded, and changes them."""

    def __init__(self, models: ServedModels, changes: ModelChanges) -> None:
        self._models = models
        self._changes = changes

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """List the served models."""
        return pb.ListModelsResponse(models=[model_to_proto(model) for model in self._models.all()])

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """Describe one served model."""
        return pb.GetModelResponse(model=model_to_proto(self._models.get(request.model)))

    async def LoadModel(self, request: pb.LoadModelRequest, context: grpc.aio.ServicerContext) -> pb.LoadModelResponse:
        """Load a model and serve it."""
        return pb.LoadModelResponse(model=model_to_proto(await self._changes.load_model(request.model, request.source)))

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadModelResponse:
        """Serve a model no more, and free it."""
        await self._changes.unload_model(request.model)
        return pb.UnloadModelResponse()

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        """Replace a model's weights between two steps."""
        expected = request.expected_version if request.HasField("expected_version") else None
        version = await self._changes.update_weights(request.model, request.path, request.label, expected)
        return pb.UpdateWeightsResponse(weight_version=version)

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Load an adapter of a model."""
        model = self._models.get(request.model).name
        adapter = await self._changes.load_adapter(model, request.adapter, request.path)
        return pb.LoadAdapterResponse(adapter=adapter_to_proto(adapter, model))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Serve an adapter no more."""
        await self._changes.unload_adapter(request.model, request.adapter)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        """List the adapters of a model."""
        model = self._models.get(request.model)
        return pb.ListAdaptersResponse(adapters=[adapter_to_proto(entry, model.name) for entry in model.adapters])
