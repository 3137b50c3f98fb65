"""What a trainer answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a batch's loss is.

    Attributes:
        loss: by `reduction`, of this batch alone.
        reduction: `mean`: the weighted sum of the tokens' losses over the sum of their weights; `sum`: the former.
        num_tokens: labels that counted.
        logprobs: log-probability of each counted label, a row each, where the label stands; 0 where none was counted.
        grad_norm: the norm of all gradients that wait for a step, before clipping; None when none were computed.
    """

    loss: float
    reduction: str
    num_tokens: int
    logprobs: list[NDArray[np.float64]]
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: the steps done with it, and the norm of the gradients before they were clipped."""

    step: int
    grad_norm: float
