"""Optimizers as plain functions: each changes a parameter and its state in place, given the gradient.

Arrays are of one dtype and any shape. Options are keyword arguments; `step` counts from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.optimizer import Optimizer

# Numbers treated at once: temporaries of a piece stay in the second-level cache, and no tensor is ever doubled.
PIECE = 1 << 15


def adamw(
    parameter: Array,
    gradient: Array,
    state: Sequence[Array],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """AdamW (Loshchilov and Hutter 2019); state: the first and the second moment."""
    beta1, beta2 = betas
    rate, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    for piece in _pieces(parameter, gradient, *state):
        p, g, m, v = piece
        p *= 1 - lr * weight_decay
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * (g * g)
        denominator = np.sqrt(v)
        denominator /= root
        denominator += eps
        np.divide(m, denominator, out=denominator)
        denominator *= rate
        p -= denominator


def sgd(
    parameter: Array,
    gradient: Array,
    state: Sequence[Array],
    step: int,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """Gradient descent with momentum (Polyak 1964), weights decayed apart from the gradient; state: the velocity."""
    for piece in _pieces(parameter, gradient, *state):
        p, g, velocity = piece
        p *= 1 - lr * weight_decay
        velocity *= momentum
        velocity += g
        p -= lr * velocity


def lion(
    parameter: Array,
    gradient: Array,
    state: Sequence[Array],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> None:
    """Lion (Chen et al. 2023): steps of one size, in the direction of the momentum's sign; state: the momentum."""
    beta1, beta2 = betas
    for piece in _pieces(parameter, gradient, *state):
        p, g, m = piece
        p *= 1 - lr * weight_decay
        p -= lr * np.sign(beta1 * m + (1 - beta1) * g)
        m *= beta2
        m += (1 - beta2) * g


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType({
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", adamw, ("first_moment", "second_moment")),
        Optimizer("sgd", sgd, ("velocity",)),
        Optimizer("lion", lion, ("momentum",)),
    )
})  # fmt: skip


def _pieces(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield flat views of the same numbers of every array, one piece after the other."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, PIECE):
        yield tuple(array[start : start + PIECE] for array in flat)
