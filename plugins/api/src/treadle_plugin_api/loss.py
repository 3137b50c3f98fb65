"""The contract of a loss: what predicted tokens cost, and by how much each logit should move.

def focal(logits, targets, *, gamma=2.0): ...  # returns RowLosses

register(Loss("focal", focal, ranges={"gamma": (0, 10)}))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from treadle_plugin_api.backend import Array

Floats = NDArray[np.float64]


class MissingTargetError(ValueError):
    """Raised by a loss that needs what the batch does not have.

    Attributes:
        field: what the caller has to give: `logprobs` or `advantages`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Targets:
    """What rows of logits are compared with.

    Attributes:
        ids: `[rows] int64`, the token that came next.
        weights: `[rows] float64`, by which a row's loss is multiplied.
        old_logprobs: `[rows] float64`, the token's log-probability under the policy that sampled it.
        advantages: `[rows] float64`, how much better than expected the token was.
    """

    ids: NDArray[np.int64]
    weights: Floats
    old_logprobs: Floats | None = None
    advantages: Floats | None = None

    def rows(self, rows: slice) -> Targets:
        """Return the targets of some rows."""
        old = None if self.old_logprobs is None else self.old_logprobs[rows]
        advantages = None if self.advantages is None else self.advantages[rows]
        return Targets(self.ids[rows], self.weights[rows], old, advantages)

    def policy_inputs(self) -> tuple[Floats, Floats]:
        """Return old_logprobs and advantages; raises MissingTargetError when the caller gave one of them not."""
        if self.old_logprobs is None:
            raise MissingTargetError("logprobs", "must be given for a policy loss: those the tokens were sampled with")
        if self.advantages is None:
            raise MissingTargetError("advantages", "must be given for a policy loss: one number a token")
        return self.old_logprobs, self.advantages


@dataclass(frozen=True, slots=True)
class RowLosses:
    """losses `[rows] float64`, weighted; dlogits `[rows, vocab]` of their sum; logprobs `[rows] float64`."""

    losses: Floats
    dlogits: Array
    logprobs: Floats


LossFunction = Callable[..., RowLosses]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by its name.

    Attributes:
        name: what callers call it: lower-case letters, digits, underscores.
        function: called as `function(logits, targets, **options)` with logits `[rows, vocab]` in the dtype of training,
            which it may write to, and that many targets. Rows are independent: a batch comes in any number of parts.
            It returns RowLosses, each row's loss and gradient multiplied by its weight; dlogits may be logits. The
            keyword-only arguments are the options; each has a default.
        ranges: option -> smallest and largest value; any finite number where an option is not in it.
    """

    name: str
    function: LossFunction
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
