"""Between the messages of the training service and what a trainer takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from treadle_protos.v1 import training_pb2 as pb

from treadle_server.errors import InvalidRequestError, Violation
from treadle_server.service.convert import value_from_proto
from treadle_server.service.training.metrics import StepMetrics
from treadle_server.service.training.rows import Rows
from treadle_server.training import LossResult

_REDUCTIONS = {
    pb.LOSS_REDUCTION_UNSPECIFIED: "mean",
    pb.LOSS_REDUCTION_MEAN: "mean",
    pb.LOSS_REDUCTION_SUM: "sum",
}
_REDUCTION_NUMBERS = {"mean": pb.LOSS_REDUCTION_MEAN, "sum": pb.LOSS_REDUCTION_SUM}
# What the log says of a call that trains.
_FIGURES = frozenset({"step", "loss", "grad_norm", "lr", "num_tokens"})
_DEFAULT_LOSS = "cross_entropy"
# Where the trainer's words for a batch stand in a request.
_BATCH_FIELDS = ("input_ids", "labels", "weights", "logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class LossChoice:
    """A loss by name, its reduction, and its options."""

    name: str
    reduction: Any
    options: dict[str, Any]


def loss_from_proto(loss: pb.LossSpec) -> LossChoice:
    """Return a loss; raises InvalidRequestError for an option that is none of the trainer's keywords."""
    if loss.reduction not in _REDUCTIONS:
        names = ", ".join(pb.LossReduction.keys())
        raise InvalidRequestError.of("loss.reduction", f"must be one of {names}, got {loss.reduction}")
    return LossChoice(loss.name or _DEFAULT_LOSS, _REDUCTIONS[loss.reduction], _options(loss.options, "loss.options"))


def optimizer_from_proto(settings: pb.OptimizerSettings) -> dict[str, Any]:
    """Return the keywords of a step; raises InvalidRequestError."""
    keywords = _options(settings.options, "optimizer.options")
    given = {field.name: value for field, value in settings.ListFields() if field.name != "options"}
    if "lr" not in given:
        raise InvalidRequestError.of("optimizer.lr", "must be given: finite, 0 or more")
    if ("beta1" in given) != ("beta2" in given):
        raise InvalidRequestError.of("optimizer.beta1", "must be given together with beta2, or neither")
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    for name in keywords.keys() & {*pb.OptimizerSettings.DESCRIPTOR.fields_by_name, "betas"}:
        raise InvalidRequestError.of(f"optimizer.options.{name}", "has a field of its own")
    return {**given, **keywords}


def _options(options: Any, path: str) -> dict[str, Any]:
    values = {name: value_from_proto(value, f"{path}.{name}") for name, value in options.items()}
    for name, value in values.items():
        if not name.isidentifier() or name in (*_BATCH_FIELDS, "self", "loss", "reduction"):
            raise InvalidRequestError.of(f"{path}.{name}", "is no option")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError.of(f"{path}.{name}", f"must be a number, but is {value!r:.100}")
    return values


@contextmanager
def loss_paths() -> Iterator[None]:
    """Let errors of the trainer name the fields of the request that has a batch and a loss."""
    with _renamed(_loss_path):
        yield


@contextmanager
def optimizer_paths() -> Iterator[None]:
    """Let errors of the trainer name the fields of the request's optimizer settings."""
    with _renamed(_optimizer_path):
        yield


@contextmanager
def _renamed(path: Any) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError([Violation(path(v.field), v.message) for v in error.violations]) from error


def _loss_path(field: str) -> str:
    if field.partition("[")[0] in _BATCH_FIELDS:
        return f"batch.rows.{field}"
    return {"loss": "loss.name", "reduction": "loss.reduction"}.get(field, f"loss.options.{field}")


def _optimizer_path(field: str) -> str:
    if field == "betas":
        return "optimizer.beta1"
    known = field in pb.OptimizerSettings.DESCRIPTOR.fields_by_name
    return f"optimizer.{field}" if known else f"optimizer.options.{field}"


def result_to_proto(result: LossResult, loss: LossChoice, rows: Rows) -> pb.LossResult:
    """Return a result with the documents of each row put together again."""
    return pb.LossResult(
        loss=result.loss,
        reduction=_REDUCTION_NUMBERS[result.reduction],
        name=loss.name,
        num_tokens=result.num_tokens,
        rows=_rows_to_proto(result, rows),
        grad_norm=result.grad_norm,
    )


def _rows_to_proto(result: LossResult, rows: Rows) -> list[pb.RowResult]:
    documents = iter(result.logprobs)
    answers = []
    for num_documents, tokens in zip(rows.num_documents, rows.encoded, strict=True):
        logprobs: Sequence[float] = [value for _ in range(num_documents) for value in next(documents).tolist()]
        answers.append(pb.RowResult(logprobs=logprobs, token_ids=tokens))
    return answers


def figures_of(request: Message, response: Message) -> dict[str, float]:
    """Return what the log says of a call that trains: step, loss, grad_norm, lr, num_tokens, as far as it has them."""
    figures: dict[str, float] = {}
    for message in (getattr(response, "result", None), response, getattr(request, "optimizer", None)):
        given = {} if message is None else {field.name: value for field, value in message.ListFields()}
        figures |= {name: given[name] for name in _FIGURES & given.keys()}
    return {name: figures[name] for name in sorted(figures)}


def metrics_to_proto(metrics: StepMetrics) -> pb.StreamMetricsResponse:
    """Return the figures of a step as a message."""
    time = Timestamp()
    time.FromNanoseconds(int(metrics.time_s * 1e9))
    return pb.StreamMetricsResponse(
        step=metrics.step,
        loss=metrics.loss,
        num_tokens=metrics.num_tokens,
        grad_norm=metrics.grad_norm,
        lr=metrics.lr,
        tokens_per_s=metrics.tokens_per_s,
        time=time,
    )
