"""Compiled twins of the server's own losses and optimizers: the same arguments, the same results to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.loss import RowLosses, Targets
from treadle_server.training import losses, optimizers

from treadle_kernels import training_rows
from treadle_kernels.stored import address_of


def cross_entropy(logits: Array, targets: Targets, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> RowLosses:
    """Return what `losses.cross_entropy` does; logits `[rows, vocab]` become its gradient."""
    if logits.dtype != np.float32 or not logits.flags.c_contiguous:
        return losses.cross_entropy(logits, targets, label_smoothing=label_smoothing, z_loss=z_loss)
    rows, vocab, weights = np.arange(len(logits)), logits.shape[1], targets.weights
    mean_logits = np.mean(logits, axis=1, dtype=np.float64) if label_smoothing else None
    chosen = logits[rows, targets.ids].astype(np.float64)
    tops, totals = np.empty((2, len(logits)), np.float32)
    training_rows.softmax_rows(logits, tops, totals)
    log_z = np.log(totals.astype(np.float64)) + tops
    logprobs = chosen - log_z
    total_losses = -(1 - label_smoothing) * logprobs + z_loss * log_z * log_z
    if mean_logits is not None:
        total_losses += label_smoothing * (log_z - mean_logits)
    factors = (1 + 2 * z_loss * log_z) * weights / totals
    added = -label_smoothing / vocab * weights
    training_rows.scale_rows(logits, factors.astype(np.float32), added.astype(np.float32))
    logits[rows, targets.ids] -= ((1 - label_smoothing) * weights).astype(np.float32)
    return RowLosses(total_losses * weights, logits, logprobs)


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
    """Do what `optimizers.adamw` does, bit for bit."""
    arrays = (parameter, gradient, *state)
    if any(array.dtype != np.float32 or not array.flags.c_contiguous for array in arrays):
        optimizers.adamw(parameter, gradient, state, step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        return
    beta1, beta2 = betas
    rate, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    constants = (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps, rate)
    places = tuple(address_of(array) for array in arrays)
    training_rows.adamw(places, parameter.size, tuple(np.float32(constant) for constant in constants))
