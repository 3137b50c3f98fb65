"""The asynchronous client of a trainer: `_training` with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from treadle_protos.v1 import training_pb2 as pb

from treadle_client import _training_convert as convert
from treadle_client._async_base import BaseAsyncClient
from treadle_client._channel import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_TRAINER_TARGET, TlsOptions
from treadle_client._fields import to_bool, to_text
from treadle_client._peer import TRAINER
from treadle_client._retry import Attempts
from treadle_client._status import from_rpc_error
from treadle_client._training_models import (
    Checkpoint,
    LoadedCheckpoint,
    LossResult,
    OptimStepResult,
    Publication,
    RowLike,
    StepMetrics,
    TrainingState,
    TrainingStepResult,
)


class AsyncTrainingClient(BaseAsyncClient):
    """`TrainingClient` for asyncio: the same arguments, methods and errors, on the event loop of its first call."""

    _kind = TRAINER

    def __init__(
        self,
        target: str = DEFAULT_TRAINER_TARGET,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        timeout_s: float | None = None,
        retries: int = 2,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(
            target, token=token, tls=tls, timeout_s=timeout_s, retries=retries, max_message_bytes=max_message_bytes
        )
        self._lock = asyncio.Lock()  # numbered calls go one after the other
        self._next_number: int | None = None

    async def compute_loss(
        self,
        rows: Sequence[RowLike],
        *,
        loss: str = "cross_entropy",
        reduction: str = "mean",
        loss_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """As `TrainingClient.compute_loss`."""
        batch, spec = convert.batch_to_proto(rows), convert.loss_to_proto(loss, reduction, loss_options)
        request = pb.ComputeLossRequest(batch=batch, loss=spec)
        response = await self._call(self._open_stubs().training.ComputeLoss, request, timeout_s)
        return convert.loss_from_proto(response.result)

    async def forward_backward(
        self,
        rows: Sequence[RowLike],
        *,
        loss: str = "cross_entropy",
        reduction: str = "mean",
        loss_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """As `TrainingClient.forward_backward`."""
        batch, spec = convert.batch_to_proto(rows), convert.loss_to_proto(loss, reduction, loss_options)
        request = pb.ForwardBackwardRequest(batch=batch, loss=spec)
        return convert.loss_from_proto((await self._numbered("ForwardBackward", request, timeout_s)).result)

    async def optim_step(
        self,
        *,
        lr: float,
        betas: Sequence[float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip_norm: float | None = None,
        momentum: float | None = None,
        optimizer_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> OptimStepResult:
        """As `TrainingClient.optim_step`."""
        settings = convert.optimizer_to_proto(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
            momentum=momentum,
            options=optimizer_options,
        )
        response = await self._numbered("OptimStep", pb.OptimStepRequest(optimizer=settings), timeout_s)
        return convert.optim_step_from_proto(response)

    async def step(
        self,
        rows: Sequence[RowLike],
        *,
        lr: float,
        loss: str = "cross_entropy",
        reduction: str = "mean",
        loss_options: Mapping[str, object] | None = None,
        betas: Sequence[float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip_norm: float | None = None,
        momentum: float | None = None,
        optimizer_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> TrainingStepResult:
        """As `TrainingClient.step`."""
        settings = convert.optimizer_to_proto(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
            momentum=momentum,
            options=optimizer_options,
        )
        batch, spec = convert.batch_to_proto(rows), convert.loss_to_proto(loss, reduction, loss_options)
        request = pb.StepRequest(batch=batch, loss=spec, optimizer=settings)
        return convert.step_from_proto(await self._numbered("Step", request, timeout_s))

    async def zero_gradients(self, *, timeout_s: float | None = None) -> None:
        """As `TrainingClient.zero_gradients`."""
        await self._numbered("ZeroGradients", pb.ZeroGradientsRequest(), timeout_s)

    async def save_checkpoint(self, name: str, *, timeout_s: float | None = None) -> Checkpoint:
        """As `TrainingClient.save_checkpoint`."""
        request = pb.SaveCheckpointRequest(name=to_text(name, "name"))
        return convert.checkpoint_from_proto((await self._numbered("SaveCheckpoint", request, timeout_s)).checkpoint)

    async def load_checkpoint(
        self, name: str, *, with_optimizer: bool, timeout_s: float | None = None
    ) -> LoadedCheckpoint:
        """As `TrainingClient.load_checkpoint`."""
        request = pb.LoadCheckpointRequest(
            name=to_text(name, "name"), with_optimizer=to_bool(with_optimizer, "with_optimizer")
        )
        if not with_optimizer:
            return convert.loaded_from_proto(await self._numbered("LoadCheckpoint", request, timeout_s))
        async with self._lock:
            response = await self._call(self._open_stubs().training.LoadCheckpoint, request, timeout_s)
            self._next_number = response.next_sequence_number
        return convert.loaded_from_proto(response)

    async def publish_weights(
        self, label: str = "", *, expected_version: int | None = None, timeout_s: float | None = None
    ) -> Publication:
        """As `TrainingClient.publish_weights`."""
        request = convert.publish_request(label, expected_version)
        return convert.publication_from_proto((await self._numbered("PublishWeights", request, timeout_s)).publication)

    async def training_state(self, *, timeout_s: float | None = None) -> TrainingState:
        """As `TrainingClient.training_state`."""
        request = pb.GetTrainingStateRequest()
        response = await self._call(self._open_stubs().training.GetTrainingState, request, timeout_s)
        return convert.state_from_proto(response)

    def stream_metrics(
        self, num_past: int | None = None, *, past_only: bool = False, timeout_s: float | None = None
    ) -> AsyncMetricsStream:
        """As `TrainingClient.stream_metrics`."""
        request = convert.metrics_request(num_past, past_only)
        attempts = self._attempts(timeout_s)
        method, metadata = self._open_stubs().training.StreamMetrics, self._connection.metadata
        return AsyncMetricsStream(method(request, timeout=attempts.remaining_s(), metadata=metadata), attempts)

    async def synchronize(self, *, timeout_s: float | None = None) -> int:
        """As `TrainingClient.synchronize`."""
        async with self._lock:
            self._next_number = (await self.training_state(timeout_s=timeout_s)).next_sequence_number
            return self._next_number

    async def _numbered(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Do a call with the next number; one that fails leaves the number to the call that follows."""
        async with self._lock:
            if self._next_number is None:
                self._next_number = (await self.training_state(timeout_s=timeout_s)).next_sequence_number
            request.sequence_number = self._next_number
            response = await self._call(getattr(self._open_stubs().training, method), request, timeout_s)
            self._next_number = request.sequence_number + 1
        return response


class AsyncMetricsStream:
    """An asynchronous iterator of StepMetrics. Closing it, leaving its `with` block or dropping it ends the stream."""

    def __init__(self, call: Any, attempts: Attempts) -> None:
        self._call = call
        self._attempts = attempts
        self._closed = False

    def __aiter__(self) -> AsyncIterator[StepMetrics]:
        return self

    async def __anext__(self) -> StepMetrics:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer) from None
        except asyncio.CancelledError:
            was_closed = self._closed
            self._cancel()
            task = asyncio.current_task()
            if was_closed and not (task is not None and task.cancelling()):  # by another task: the stream ends
                raise StopAsyncIteration from None
            raise
        if not isinstance(response, pb.StreamMetricsResponse):  # grpc.aio.EOF
            raise StopAsyncIteration
        return convert.metrics_from_proto(response)

    async def close(self) -> None:
        """End the stream; iterating ends."""
        self._cancel()

    def _cancel(self) -> None:
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._call.cancel()
