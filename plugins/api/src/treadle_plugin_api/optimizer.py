"""The contract of an optimizer: how a parameter moves, given its gradient.

def signs(parameter, gradient, state, step, *, lr, weight_decay=0.0):
parameter *= 1 - lr * weight_decay
parameter -= lr * np.sign(gradient)

register(Optimizer("signs", signs))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer by its name.

    Attributes:
        name: what callers call it: lower-case letters, digits, underscores.
        apply: called as `apply(parameter, gradient, state, step, *, lr, weight_decay, **options)` for each parameter of
            a step; changes the parameter and its state in place. Arrays are of one dtype, float32 or float64, and of
            any shape; `step` counts from 1; the gradient, clipped already, may be written to. Its further keyword-only
            arguments are the options, numbers of 0 or more, `betas` two of them; each has a default.
        state_names: what its state arrays are called, each of the parameter's shape and 0 at first.
    """

    name: str
    apply: Callable[..., None]
    state_names: tuple[str, ...] = ()
