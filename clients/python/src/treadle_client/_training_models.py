"""What the training client takes and returns: frozen dataclasses, in the protocol's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from treadle_client._models import Message


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a batch. A bare text, list of token ids or list of messages does as well where nothing else is said.

    Numbers stand where their tokens stand, one each; the server shifts labels, so that token t - 1 predicts label t.

    Attributes:
        input: a text, a list of messages, or a list of token ids. Everything below but append_eos is for token ids.
        append_eos: whether the model's end-of-sequence token follows a text.
        document_lengths: lengths of the documents that are packed into the row; none sees another.
        labels: the token wanted at each place, -100 where none is; the tokens themselves when None.
        weights: by how much each label counts; 1 when None.
        logprobs: log-probability with which each token was sampled, for policy losses.
        advantages: how much better than expected each token was, for policy losses.
    """

    input: str | Sequence[int] | Sequence[Message | Mapping[str, str]]
    append_eos: bool = False
    document_lengths: Sequence[int] | None = None
    labels: Sequence[int] | None = None
    weights: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None
    advantages: Sequence[float] | None = None


RowLike: TypeAlias = TrainingRow | str | Sequence[int] | Sequence[Message | Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """What a batch's loss is.

    Attributes:
        loss: by `reduction`, of this batch alone.
        reduction: `mean` (the weighted sum of the tokens' losses over the sum of their weights) or `sum` (the former).
        name: name of the loss.
        num_tokens: labels that counted.
        logprobs: log-probability of each label, a row each, where the label stands; 0 where none counted.
        token_ids: the tokens of each row that was a text or messages; empty for token ids.
        grad_norm: norm of all gradients that wait, before clipping; None when none were computed.
    """

    loss: float
    reduction: str
    name: str
    num_tokens: int
    logprobs: tuple[tuple[float, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    grad_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResult:
    """A step that was done: how many there are now, and the norm of its gradients before they were clipped."""

    step: int
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStepResult:
    """A batch and its step: the loss before it, the steps done, the norm of its gradients before they were clipped."""

    result: LossResult
    step: int
    grad_norm: float

    @property
    def loss(self) -> float:
        """The loss before the step."""
        return self.result.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved checkpoint: its name, the steps done, and the number of the call that follows it."""

    name: str
    step: int
    next_sequence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a trainer is at after it loaded a checkpoint: steps done, and the number of the next call."""

    step: int
    next_sequence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights, or an adapter, that a server took: its model's name, the versions it serves, the steps they had.

    `adapter` is empty and `adapter_version` 0 when the weights themselves were published.
    """

    model: str
    weight_version: int
    adapter: str
    adapter_version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where the training stands. `lora_rank` is 0 when the weights themselves are trained."""

    model: str
    model_type: str
    dtype: str
    optimizer: str
    vocab_size: int
    context_length: int
    num_parameters: int
    num_trainable_parameters: int
    lora_rank: int
    step: int
    num_waiting_batches: int
    next_sequence_number: int
    num_queued_calls: int
    max_queued_calls: int
    checkpoints: tuple[Checkpoint, ...]
    published: Publication | None
    losses: tuple[str, ...]
    uptime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The figures of one step; `time_s` is the Unix time at its end."""

    step: int
    loss: float
    num_tokens: int
    grad_norm: float
    lr: float
    tokens_per_s: float
    time_s: float
