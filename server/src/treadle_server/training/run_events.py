"""What a training run tells while it goes, and at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["finished", "stopped_early", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step of the optimizer.

    Attributes:
        step: steps done.
        num_steps: steps of the whole run; estimated where epochs say when it ends.
        epochs: epochs done.
        num_tokens: tokens read since the run began.
        loss: mean loss of the step's tokens, in nats.
        lr: the step's learning rate.
        grad_norm: norm of the gradients before clipping.
        tokens_per_s: tokens a second of this step.
    """

    step: int
    num_steps: int
    epochs: float
    num_tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The held-out loss after a step, the mean over all held-out tokens in nats, and whether it is the best so far."""

    step: int
    loss: float
    is_best: bool

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete."""

    step: int
    folder: Path


RunEvent = StepDone | Evaluated | CheckpointSaved


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run.

    Attributes:
        status: `finished`; `stopped_early` when evaluations got no better; `interrupted` when it was told to stop.
        folder: the run's folder, which is a model folder unless the run was interrupted.
        checkpoint: the newest checkpoint.
        step: steps done.
        epochs: epochs done.
        num_tokens: tokens read.
        loss: the last step's.
        best_step: the step whose model the folder holds; the last without held-out data.
        held_out_loss: of that step; None without held-out data.
        perplexity: its exponential.
    """

    status: Status
    folder: Path
    checkpoint: Path
    step: int
    epochs: float
    num_tokens: int
    loss: float
    best_step: int
    held_out_loss: float | None
    perplexity: float | None


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where float64 has no such number."""
    return math.exp(loss) if loss < 700 else math.inf
