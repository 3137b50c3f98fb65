"""Requests of the training service from arguments, and models from its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle_protos.v1 import training_pb2 as pb

from treadle_client._convert import enum_name
from treadle_client._exceptions import InvalidArgumentError, Violation
from treadle_client._fields import refuse, set_field, to_bool, to_float, to_items, to_text, to_value
from treadle_client._options import set_prompt
from treadle_client._training_models import (
    Checkpoint,
    LoadedCheckpoint,
    LossResult,
    OptimStepResult,
    Publication,
    StepMetrics,
    TrainingRow,
    TrainingState,
    TrainingStepResult,
)

_LISTS = ("document_lengths", "labels", "weights", "logprobs", "advantages")


def batch_to_proto(rows: object) -> pb.TrainingBatch:
    """Make a batch of rows, each a TrainingRow or what stands for one."""
    items = to_items(rows, "rows", "a list of rows")
    return pb.TrainingBatch(rows=[_row_to_proto(row, f"rows[{index}]") for index, row in enumerate(items)])


def _row_to_proto(row: object, path: str) -> pb.TrainingRow:
    given = row if isinstance(row, TrainingRow) else TrainingRow(row)  # type: ignore[arg-type]  # checked below
    message = pb.TrainingRow(append_eos=to_bool(given.append_eos, f"{path}.append_eos"))
    _set_input(message, given.input, path)
    for name in _LISTS:
        values = getattr(given, name)
        if values is not None:
            set_field(message, name, values, f"{path}.{name}")
    return message


def _set_input(message: pb.TrainingRow, value: object, path: str) -> None:
    try:
        set_prompt(message, value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError.of([Violation(f"{path}.{v.field}", v.message) for v in error.violations]) from None


def loss_to_proto(loss: object, reduction: object, options: Mapping[str, object] | None) -> pb.LossSpec:
    """Make a loss by name."""
    message = pb.LossSpec(name=to_text(loss, "loss"))
    set_field(message, "reduction", reduction, "reduction")
    _set_options(message, options, "loss_options")
    return message


def optimizer_to_proto(
    *, betas: Sequence[float] | None, options: Mapping[str, object] | None, **settings: object
) -> pb.OptimizerSettings:
    """Make the settings of a step; what is None stays unset."""
    message = pb.OptimizerSettings()
    if betas is not None:
        pair = to_items(betas, "betas", "two numbers")
        if len(pair) != 2:
            raise refuse("betas", "two numbers", betas)
        message.beta1, message.beta2 = (to_float(beta, "betas") for beta in pair)
    for name, value in settings.items():
        if value is not None:
            set_field(message, name, value, name)
    _set_options(message, options, "optimizer_options")
    return message


def _set_options(message: Any, options: Mapping[str, object] | None, path: str) -> None:
    for name, value in (options or {}).items():
        key = to_text(name, f"{path} (a name)")
        message.options[key].CopyFrom(to_value(value, f"{path}.{key}"))


def publish_request(label: object, expected_version: object) -> pb.PublishWeightsRequest:
    """Make the request of `publish_weights`."""
    request = pb.PublishWeightsRequest(label=to_text(label, "label"))
    if expected_version is not None:
        set_field(request, "expected_version", expected_version, "expected_version")
    return request


def metrics_request(num_past: object, past_only: object) -> pb.StreamMetricsRequest:
    """Make the request of `stream_metrics`."""
    request = pb.StreamMetricsRequest(past_only=to_bool(past_only, "past_only"))
    if num_past is not None:
        set_field(request, "num_past", num_past, "num_past")
    return request


def loss_from_proto(result: pb.LossResult) -> LossResult:
    """Convert a loss."""
    return LossResult(
        loss=result.loss,
        reduction=enum_name(pb.LossReduction.DESCRIPTOR, result.reduction),
        name=result.name,
        num_tokens=result.num_tokens,
        logprobs=tuple(tuple(row.logprobs) for row in result.rows),
        token_ids=tuple(tuple(row.token_ids) for row in result.rows),
        grad_norm=result.grad_norm if result.HasField("grad_norm") else None,
    )


def optim_step_from_proto(response: pb.OptimStepResponse) -> OptimStepResult:
    """Convert a step."""
    return OptimStepResult(step=response.step, grad_norm=response.grad_norm)


def step_from_proto(response: pb.StepResponse) -> TrainingStepResult:
    """Convert a batch and its step."""
    result = loss_from_proto(response.result)
    return TrainingStepResult(result=result, step=response.step, grad_norm=response.grad_norm)


def checkpoint_from_proto(checkpoint: pb.Checkpoint) -> Checkpoint:
    """Convert a checkpoint."""
    return Checkpoint(name=checkpoint.name, step=checkpoint.step, next_sequence_number=checkpoint.next_sequence_number)


def loaded_from_proto(response: pb.LoadCheckpointResponse) -> LoadedCheckpoint:
    """Convert what loading a checkpoint came to."""
    return LoadedCheckpoint(step=response.step, next_sequence_number=response.next_sequence_number)


def publication_from_proto(publication: pb.Publication) -> Publication:
    """Convert a publication."""
    return Publication(
        model=publication.model,
        weight_version=publication.weight_version,
        adapter=publication.adapter,
        adapter_version=publication.adapter_version,
        step=publication.step,
    )


def state_from_proto(state: pb.GetTrainingStateResponse) -> TrainingState:
    """Convert the state of a training."""
    return TrainingState(
        model=state.model,
        model_type=state.model_type,
        dtype=state.dtype,
        optimizer=state.optimizer,
        vocab_size=state.vocab_size,
        context_length=state.context_length,
        num_parameters=state.num_parameters,
        num_trainable_parameters=state.num_trainable_parameters,
        lora_rank=state.lora_rank,
        step=state.step,
        num_waiting_batches=state.num_waiting_batches,
        next_sequence_number=state.next_sequence_number,
        num_queued_calls=state.num_queued_calls,
        max_queued_calls=state.max_queued_calls,
        checkpoints=tuple(checkpoint_from_proto(saved) for saved in state.checkpoints),
        published=publication_from_proto(state.published) if state.HasField("published") else None,
        losses=tuple(state.losses),
        uptime_s=state.uptime.ToTimedelta().total_seconds(),
    )


def metrics_from_proto(metrics: pb.StreamMetricsResponse) -> StepMetrics:
    """Convert the figures of a step."""
    return StepMetrics(
        step=metrics.step,
        loss=metrics.loss,
        num_tokens=metrics.num_tokens,
        grad_norm=metrics.grad_norm,
        lr=metrics.lr,
        tokens_per_s=metrics.tokens_per_s,
        time_s=metrics.time.seconds + metrics.time.nanos * 1e-9,
    )
