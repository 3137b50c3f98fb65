"""The synchronous client of a trainer. `_async_training` has the same methods with `await`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from treadle_protos.v1 import training_pb2 as pb

from treadle_client import _training_convert as convert
from treadle_client._base import BaseClient
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


class TrainingClient(BaseClient):
    """A connection to a `treadle trainer`; use it as a context manager, or close it. Threads may share it.

    Every call that changes something carries a sequence number, so it is safe to send again: the client does so by
    itself when the trainer cannot be reached, and you may after any error, with the same arguments. The first call asks
    the trainer for its count. Where another client changed something meanwhile, or a trainer came back from an earlier
    checkpoint, calls are refused with a ConflictError that names the number expected; `synchronize` takes it over.

    Args:
        target: host:port of the trainer, or another gRPC target such as `unix:/path`.
        token: sent with each call, over TLS or to this machine only.
        tls: how to speak TLS; None for plain text.
        timeout_s: seconds for each call that names none; None for no limit.
        retries: how often a call is repeated that the trainer's full queue refused, or that reached no trainer.
        max_message_bytes: largest message to send or take.
    """

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
        self._lock = threading.RLock()  # numbered calls go one after the other
        self._next_number: int | None = None

    def compute_loss(
        self,
        rows: Sequence[RowLike],
        *,
        loss: str = "cross_entropy",
        reduction: str = "mean",
        loss_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """Return a batch's loss; nothing changes. Arguments as for `forward_backward`."""
        batch, spec = convert.batch_to_proto(rows), convert.loss_to_proto(loss, reduction, loss_options)
        request = pb.ComputeLossRequest(batch=batch, loss=spec)
        return convert.loss_from_proto(self._call(self._open_stubs().training.ComputeLoss, request, timeout_s).result)

    def forward_backward(
        self,
        rows: Sequence[RowLike],
        *,
        loss: str = "cross_entropy",
        reduction: str = "mean",
        loss_options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """Return a batch's loss, and add its gradients to those that wait for `optim_step`.

        Args:
            rows: texts, lists of token ids, lists of messages, or TrainingRows; of any lengths, none sees another.
            loss: `cross_entropy`, `importance_sampling`, `ppo` or a plugin's.
            reduction: `mean` or `sum`.
            loss_options: numbers by name: label_smoothing and z_loss of cross_entropy, clip_range of ppo.
            timeout_s: see the class.
        """
        batch, spec = convert.batch_to_proto(rows), convert.loss_to_proto(loss, reduction, loss_options)
        request = pb.ForwardBackwardRequest(batch=batch, loss=spec)
        return convert.loss_from_proto(self._numbered("ForwardBackward", request, timeout_s).result)

    def optim_step(
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
        """Change the weights by the gradients that wait, which are gone afterwards.

        Args:
            lr: learning rate.
            betas: decays of the moments, of adamw and lion.
            eps: added to the root of the second moment, of adamw.
            weight_decay: share of a weight taken off, times lr.
            grad_clip_norm: largest norm of all gradients together; larger ones are scaled down.
            momentum: of sgd.
            optimizer_options: further numbers by name, such as a plugin's.
            timeout_s: see the class.
        """
        settings = convert.optimizer_to_proto(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
            momentum=momentum,
            options=optimizer_options,
        )
        response = self._numbered("OptimStep", pb.OptimStepRequest(optimizer=settings), timeout_s)
        return convert.optim_step_from_proto(response)

    def step(
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
        """Do `forward_backward` and `optim_step` in one: both are done, or neither. Arguments as for those."""
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
        return convert.step_from_proto(self._numbered("Step", request, timeout_s))

    def zero_gradients(self, *, timeout_s: float | None = None) -> None:
        """Forget the gradients that wait."""
        self._numbered("ZeroGradients", pb.ZeroGradientsRequest(), timeout_s)

    def save_checkpoint(self, name: str, *, timeout_s: float | None = None) -> Checkpoint:
        """Save everything under the trainer's checkpoint root, complete or not at all; refused while gradients wait."""
        request = pb.SaveCheckpointRequest(name=to_text(name, "name"))
        return convert.checkpoint_from_proto(self._numbered("SaveCheckpoint", request, timeout_s).checkpoint)

    def load_checkpoint(self, name: str, *, with_optimizer: bool, timeout_s: float | None = None) -> LoadedCheckpoint:
        """Load a checkpoint.

        Args:
            name: its name under the trainer's checkpoint root.
            with_optimizer: True to go on where it was saved, sequence numbers too; False for its weights alone: the
                optimizer begins anew at step 0.
            timeout_s: see the class.
        """
        request = pb.LoadCheckpointRequest(
            name=to_text(name, "name"), with_optimizer=to_bool(with_optimizer, "with_optimizer")
        )
        if not with_optimizer:
            return convert.loaded_from_proto(self._numbered("LoadCheckpoint", request, timeout_s))
        with self._lock:
            response = self._call(self._open_stubs().training.LoadCheckpoint, request, timeout_s)
            self._next_number = response.next_sequence_number
        return convert.loaded_from_proto(response)

    def publish_weights(
        self, label: str = "", *, expected_version: int | None = None, timeout_s: float | None = None
    ) -> Publication:
        """Give the weights, or the adapter that is trained, to the server that the trainer was started with.

        Args:
            label: kept with the version, for people.
            expected_version: refuses unless the server has this version of the weights.
            timeout_s: see the class.
        """
        request = convert.publish_request(label, expected_version)
        return convert.publication_from_proto(self._numbered("PublishWeights", request, timeout_s).publication)

    def training_state(self, *, timeout_s: float | None = None) -> TrainingState:
        """Return where the training stands; it does not wait for calls under way."""
        request = pb.GetTrainingStateRequest()
        return convert.state_from_proto(self._call(self._open_stubs().training.GetTrainingState, request, timeout_s))

    def stream_metrics(
        self, num_past: int | None = None, *, past_only: bool = False, timeout_s: float | None = None
    ) -> MetricsStream:
        """Return an iterator over the figures of steps: past ones that the trainer keeps, then each new one.

        Args:
            num_past: number of past steps to begin with; all that are kept when None.
            past_only: ends after the past steps.
            timeout_s: see the class.
        """
        request = convert.metrics_request(num_past, past_only)
        attempts = self._attempts(timeout_s)
        method, metadata = self._open_stubs().training.StreamMetrics, self._connection.metadata
        return MetricsStream(method(request, timeout=attempts.remaining_s(), metadata=metadata), attempts)

    def synchronize(self, *, timeout_s: float | None = None) -> int:
        """Take over the trainer's count of calls, and return the number that the next one has."""
        with self._lock:
            self._next_number = self.training_state(timeout_s=timeout_s).next_sequence_number
            return self._next_number

    def _numbered(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Do a call with the next number; one that fails leaves the number to the call that follows."""
        with self._lock:
            if self._next_number is None:
                self.synchronize(timeout_s=timeout_s)
            request.sequence_number = self._next_number
            response = self._call(getattr(self._open_stubs().training, method), request, timeout_s)
            self._next_number = request.sequence_number + 1
        return response


class MetricsStream:
    """An iterator of StepMetrics. Closing it, leaving its `with` block or dropping it ends the stream."""

    def __init__(self, call: Any, attempts: Attempts) -> None:
        self._call = call
        self._attempts = attempts
        self._closed = False

    def __iter__(self) -> Iterator[StepMetrics]:
        return self

    def __next__(self) -> StepMetrics:
        try:
            return convert.metrics_from_proto(next(self._call))
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise from_rpc_error(error, self._attempts.timeout_s, peer=self._attempts.peer) from None

    def close(self) -> None:
        """End the stream; iterating ends."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()
