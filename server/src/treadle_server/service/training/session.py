"""What the calls of the training service do to the trainer. Everything runs on the trainer's thread, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from treadle_protos.v1 import training_pb2 as pb

from treadle_server.errors import InvalidRequestError, TrainingError, TreadleError
from treadle_server.service.training.calls import CallLog, read_calls
from treadle_server.service.training.checkpoints import CheckpointRoot
from treadle_server.service.training.convert import LossChoice, loss_paths, optimizer_paths, result_to_proto
from treadle_server.service.training.metrics import BatchTally, StepMetrics
from treadle_server.service.training.publish import Publisher
from treadle_server.service.training.rows import Rows
from treadle_server.training import LossResult, StepResult, Trainer

_Response = TypeVar("_Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the training stands after a call; made anew after each, so that any thread can look at it.

    `kept_step` is the newest step that was saved, published or loaded.
    """

    step: int = 0
    kept_step: int = 0
    num_waiting_batches: int = 0
    next_number: int = 1


class TrainingSession:
    """A trainer with its numbered calls, checkpoints, metrics and publisher."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: CheckpointRoot,
        publisher: Publisher,
        report: Callable[[StepMetrics], object],
    ) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._report = report
        self._calls = CallLog()
        self._tally = BatchTally()
        self._broken: str | None = None
        self._kept_step = trainer.step
        self.progress = Progress(trainer.step, trainer.step)

    def resume(self, name: str) -> None:
        """Go on from a checkpoint, sequence numbers included."""
        self._restore(name, with_optimizer=True)
        self._note_progress()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def compute_loss(self, rows: Rows, loss: LossChoice) -> pb.ComputeLossResponse:
        """Return a batch's loss."""
        self._refuse_broken()
        with loss_paths(), _memory_named():
            result = self._trainer.compute_loss(**_batch_keywords(rows, loss))
        return pb.ComputeLossResponse(result=result_to_proto(result, loss, rows))

    def forward_backward(
        self, request: pb.ForwardBackwardRequest, rows: Rows, loss: LossChoice
    ) -> pb.ForwardBackwardResponse:
        """Add a batch's gradients to those that wait."""

        def run() -> pb.ForwardBackwardResponse:
            result = self._forward_backward(rows, loss)
            return pb.ForwardBackwardResponse(result=result_to_proto(result, loss, rows))

        return self._numbered(request, pb.ForwardBackwardResponse, run)

    def optim_step(self, request: pb.OptimStepRequest, settings: Mapping[str, Any]) -> pb.OptimStepResponse:
        """Do a step with the gradients that wait."""

        def run() -> pb.OptimStepResponse:
            done = self._optim_step(settings)
            return pb.OptimStepResponse(step=done.step, grad_norm=done.grad_norm)

        return self._numbered(request, pb.OptimStepResponse, run)

    def step(
        self, request: pb.StepRequest, rows: Rows, loss: LossChoice, settings: Mapping[str, Any]
    ) -> pb.StepResponse:
        """Do a batch and its step, or neither."""

        def run() -> pb.StepResponse:
            if self._trainer.has_gradients:
                raise TrainingError("gradients of other batches wait for a step: OptimStep does it, ZeroGradients not")
            with optimizer_paths():
                self._trainer.check_step(**settings)
            result = self._forward_backward(rows, loss)
            try:
                done = self._optim_step(settings)
            except TreadleError:
                self._forget_gradients()
                raise
            answer = result_to_proto(result, loss, rows)
            return pb.StepResponse(result=answer, step=done.step, grad_norm=done.grad_norm)

        return self._numbered(request, pb.StepResponse, run)

    def zero_gradients(self, request: pb.ZeroGradientsRequest) -> pb.ZeroGradientsResponse:
        """Forget the gradients that wait."""

        def run() -> pb.ZeroGradientsResponse:
            self._forget_gradients()
            return pb.ZeroGradientsResponse()

        return self._numbered(request, pb.ZeroGradientsResponse, run)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest) -> pb.SaveCheckpointResponse:
        """Save everything, this call's own number included."""
        remembered = self._calls.answer_to(request)
        if remembered is not None:
            return pb.SaveCheckpointResponse.FromString(remembered)
        self._refuse_broken()
        folder = self._checkpoints.place(request.name)
        if self._trainer.has_gradients:
            # Their calls would count as done in the checkpoint, and they would be gone.
            raise TrainingError("gradients wait for a step, and no checkpoint holds any: call OptimStep first")
        next_number = self._calls.next_number + request.HasField("sequence_number")
        saved = pb.Checkpoint(name=request.name, step=self._trainer.step, next_sequence_number=next_number)
        response = pb.SaveCheckpointResponse(checkpoint=saved)
        calls = self._calls.after(request, response)
        self._trainer.save(folder, files=calls.files())
        self._calls = calls
        self._kept_step = self._trainer.step
        self._note_progress()
        return response

    def load_checkpoint(self, request: pb.LoadCheckpointRequest) -> pb.LoadCheckpointResponse:
        """Load the weights, or all that was saved."""
        if request.with_optimizer:
            if request.HasField("sequence_number"):
                raise InvalidRequestError.of("sequence_number", "must be unset with with_optimizer: see the service")
            self._restore(request.name, with_optimizer=True)
            self._note_progress()
            return pb.LoadCheckpointResponse(step=self._trainer.step, next_sequence_number=self._calls.next_number)

        def run() -> pb.LoadCheckpointResponse:
            self._restore(request.name, with_optimizer=False)
            next_number = self._calls.next_number + request.HasField("sequence_number")
            return pb.LoadCheckpointResponse(step=self._trainer.step, next_sequence_number=next_number)

        return self._numbered(request, pb.LoadCheckpointResponse, run, mends=True)

    def publish_weights(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsResponse:
        """Give the weights to the server."""

        def run() -> pb.PublishWeightsResponse:
            expected = request.expected_version if request.HasField("expected_version") else None
            publication = self._publisher.publish(self._trainer, label=request.label, expected_version=expected)
            self._kept_step = self._trainer.step
            return pb.PublishWeightsResponse(publication=publication)

        return self._numbered(request, pb.PublishWeightsResponse, run)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _numbered(
        self, request: Message, kind: type[_Response], run: Callable[[], _Response], *, mends: bool = False
    ) -> _Response:
        """Do a call once: what was done before is answered as it was then. What fails changes no number."""
        remembered = self._calls.answer_to(request)
        if remembered is not None:
            return kind.FromString(remembered)
        if not mends:
            self._refuse_broken()
        response = run()
        self._calls = self._calls.after(request, response)
        self._note_progress()
        return response

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Note a fault that is no refusal: it may have left the weights half changed."""
        try:
            yield
        except TreadleError:
            raise
        except BaseException as error:
            self._broken = f"{type(error).__name__} interrupted a call"
            raise

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise TrainingError(f"{self._broken}, so the weights may be half changed: load a checkpoint")

    def _forward_backward(self, rows: Rows, loss: LossChoice) -> LossResult:
        begun_s = time.perf_counter()
        with loss_paths(), _memory_named():
            result = self._trainer.forward_backward(**_batch_keywords(rows, loss))
        self._tally.add(result, time.perf_counter() - begun_s)
        return result

    def _optim_step(self, settings: Mapping[str, Any]) -> StepResult:
        begun_s = time.perf_counter()
        with optimizer_paths(), self._guarded():
            done = self._trainer.optim_step(**settings)
        work_s = time.perf_counter() - begun_s
        self._report(self._tally.metrics(step=done.step, grad_norm=done.grad_norm, lr=settings["lr"], work_s=work_s))
        self._tally = BatchTally()
        return done

    def _forget_gradients(self) -> None:
        self._trainer.zero_gradients()
        self._tally = BatchTally()

    def _restore(self, name: str, *, with_optimizer: bool) -> None:
        folder = self._checkpoints.find(name)
        calls = read_calls(folder) if with_optimizer else self._calls
        with self._guarded():
            if with_optimizer:
                self._trainer.load_state(folder)
            else:
                self._trainer.load_weights(folder)
        self._calls, self._tally, self._broken = calls, BatchTally(), None
        self._kept_step = self._trainer.step

    def _note_progress(self) -> None:
        step, next_number = self._trainer.step, self._calls.next_number
        self.progress = Progress(step, self._kept_step, self._tally.num_batches, next_number)


@contextmanager
def _memory_named() -> Iterator[None]:
    """Refuse a batch that does not fit into memory; until its gradients are there, nothing has changed."""
    try:
        yield
    except MemoryError as error:
        raise TrainingError("the batch needs more memory than there is: nothing was changed; send less") from error


def _batch_keywords(rows: Rows, loss: LossChoice) -> dict[str, Any]:
    return {**rows.lists, **loss.options, "loss": loss.name, "reduction": loss.reduction}
