"""Gradients between two steps: gathered over batches, checked, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.errors import TrainingError
from treadle_server.training.threads import BlasThreads

# A smaller sum of squares may have lost some that float32 cannot hold.
_TINY = 1e-20


class Accumulator:
    """The gradient of the sum of all losses since the last step, and what it is to be divided by.

    So a batch in several parts gives the gradient that it gives in one, also where the parts count different numbers
    of tokens.

    Attributes:
        sums: the gradients, before they are divided.
    """

    def __init__(self, threads: BlasThreads) -> None:
        self.reduction: str | None = None
        self._threads = threads
        self.sums: dict[str, Array] = {}
        self._squares: list[float] = []
        self._total_weight = 0.0

    @property
    def is_empty(self) -> bool:
        """True when no batch has been added."""
        return self.reduction is None

    @property
    def scale(self) -> float:
        """By what the sums are multiplied: 1 over the weight of all counted tokens for a mean, else 1."""
        return 1 / self._total_weight if self.reduction == "mean" else 1.0

    def check_reduction(self, reduction: str) -> None:
        """Raise TrainingError when a batch does not go with those before it."""
        if self.reduction not in (None, reduction):
            raise TrainingError(f"gradients of {self.reduction} losses wait for a step; they cannot take a {reduction}")

    def add(self, grads: dict[str, Array], weight: float, reduction: str, file_name: Callable[[str], str]) -> None:
        """Add the gradients of a batch's summed loss. The arrays belong to the accumulator afterwards.

        Raises TrainingError, nothing added, naming the first tensor whose gradient has a NaN or an infinity.
        """
        self.check_reduction(reduction)
        squares = self._threads.each(square_sum, list(grads.values()))
        check_finite(dict(zip(grads, squares, strict=True)), file_name)
        if self.is_empty:
            self.sums, self._squares = grads, squares
        else:
            for name, gradient in grads.items():
                self.sums[name] += gradient
            self._squares = self._threads.each(square_sum, list(self.sums.values()))
        self.reduction = reduction
        self._total_weight += weight

    def norm(self) -> float:
        """Return the norm of all gradients as one vector."""
        return self.scale * math.sqrt(math.fsum(self._squares))

    def scaled(self) -> dict[str, Array]:
        """Return the gradients, copied."""
        return {name: gradient * gradient.dtype.type(self.scale) for name, gradient in self.sums.items()}

    def clear(self) -> None:
        """Forget all gradients."""
        self.reduction, self.sums, self._squares, self._total_weight = None, {}, [], 0.0


def check_finite(squares: Mapping[str, float], file_name: Callable[[str], str]) -> None:
    """Raise TrainingError naming the first tensor whose gradient's sum of squares is not finite."""
    for name, square in squares.items():
        if not math.isfinite(square):
            raise TrainingError(
                f"the gradient of {file_name(name)} is not finite: nothing was changed. "
                "Lower the learning rate, or look at this batch."
            )


def square_sum(array: Array) -> float:
    """Return the sum of squares; where float32 has no room for it, it is worked out in float64."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
        has_room = math.isfinite(total) and (total > _TINY or not flat.any())
        return total if has_room else float(np.sum(np.square(flat, dtype=np.float64)))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients are multiplied by so that their norm is max_norm at most (Pascanu et al. 2013)."""
    if max_norm is None:
        return 1.0
    # The small number keeps a norm of 0 harmless; PyTorch has the same.
    return min(1.0, max_norm / (norm + 1e-6))
