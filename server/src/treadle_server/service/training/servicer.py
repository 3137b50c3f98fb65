"""TrainingService: checks requests on the event loop's threads, and lets the trainer's thread answer them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from treadle_protos.v1 import training_pb2 as pb
from treadle_protos.v1 import training_pb2_grpc

from treadle_server.errors import UnavailableError
from treadle_server.service.convert import duration_to_proto
from treadle_server.service.observability.call_record import current_call
from treadle_server.service.off_loop import run_off_loop
from treadle_server.service.training.convert import figures_of, loss_from_proto, metrics_to_proto, optimizer_from_proto
from treadle_server.service.training.loading import LoadedTrainer
from treadle_server.service.training.metrics import MetricsLog
from treadle_server.service.training.worker import TrainerWorker

_T = TypeVar("_T")
_Response = TypeVar("_Response", bound=Message)


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    """Belongs to one event loop. It answers UNAVAILABLE until it is opened, and from when it is drained."""

    def __init__(self, executor: Executor, worker: TrainerWorker, metrics: MetricsLog) -> None:
        self._executor = executor
        self._worker = worker
        self._metrics = metrics
        self._loaded: LoadedTrainer | None = None
        self._unavailable = "the trainer is loading its model"
        self._started_s = time.monotonic()

    def open(self, loaded: LoadedTrainer) -> None:
        """Take calls from now on."""
        self._loaded = loaded

    def drain(self) -> None:
        """Refuse new calls, and end the streams of metrics."""
        self._loaded, self._unavailable = None, "the trainer is shutting down and takes no new calls"
        self._metrics.close()

    def last_publication(self) -> pb.Publication | None:
        """Return what was published last; any thread may ask."""
        loaded = self._loaded
        return None if loaded is None else loaded.publisher.last

    def _open(self) -> LoadedTrainer:
        if self._loaded is None:
            raise UnavailableError(self._unavailable)
        return self._loaded

    async def ComputeLoss(
        self, request: pb.ComputeLossRequest, context: grpc.aio.ServicerContext
    ) -> pb.ComputeLossResponse:
        """Return a batch's loss."""
        loaded, loss = self._open(), loss_from_proto(request.loss)
        rows = await self._off_loop(partial(loaded.reader.read, request.batch))
        return await self._trained(request, partial(loaded.session.compute_loss, rows, loss))

    async def ForwardBackward(
        self, request: pb.ForwardBackwardRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForwardBackwardResponse:
        """Add a batch's gradients to those that wait."""
        loaded, loss = self._open(), loss_from_proto(request.loss)
        rows = await self._off_loop(partial(loaded.reader.read, request.batch))
        return await self._trained(request, partial(loaded.session.forward_backward, request, rows, loss))

    async def OptimStep(self, request: pb.OptimStepRequest, context: grpc.aio.ServicerContext) -> pb.OptimStepResponse:
        """Do a step with the gradients that wait."""
        loaded, settings = self._open(), optimizer_from_proto(request.optimizer)
        return await self._trained(request, partial(loaded.session.optim_step, request, settings))

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        """Do a batch and its step, or neither."""
        loaded, loss = self._open(), loss_from_proto(request.loss)
        settings = optimizer_from_proto(request.optimizer)
        rows = await self._off_loop(partial(loaded.reader.read, request.batch))
        return await self._trained(request, partial(loaded.session.step, request, rows, loss, settings))

    async def ZeroGradients(
        self, request: pb.ZeroGradientsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ZeroGradientsResponse:
        """Forget the gradients that wait."""
        return await self._worker.run(partial(self._open().session.zero_gradients, request))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.SaveCheckpointResponse:
        """Save everything."""
        return await self._worker.run(partial(self._open().session.save_checkpoint, request))

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadCheckpointResponse:
        """Load the weights, or all that was saved."""
        return await self._worker.run(partial(self._open().session.load_checkpoint, request))

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishWeightsResponse:
        """Give the weights to the server."""
        return await self._worker.run(partial(self._open().session.publish_weights, request))

    async def GetTrainingState(
        self, request: pb.GetTrainingStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainingStateResponse:
        """Return where the training stands."""
        state = await self._off_loop(self._open().state)
        state.num_queued_calls = self._worker.num_calls
        state.max_queued_calls = self._worker.max_calls
        state.uptime.CopyFrom(duration_to_proto(time.monotonic() - self._started_s))
        return state

    async def StreamMetrics(
        self, request: pb.StreamMetricsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamMetricsResponse]:
        """Stream the figures of steps."""
        self._open()
        num_past = request.num_past if request.HasField("num_past") else None
        async for metrics in self._metrics.follow(num_past, past_only=request.past_only):
            yield metrics_to_proto(metrics)

    async def _trained(self, request: Message, call: Callable[[], _Response]) -> _Response:
        """Run a call on the trainer's thread, and let the log have its figures."""
        response = await self._worker.run(call)
        current_call().figures = figures_of(request, response)
        return response

    async def _off_loop(self, function: Callable[[], _T]) -> _T:
        return await run_off_loop(self._executor, function)
