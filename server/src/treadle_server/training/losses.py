"""Losses of predicted tokens as pure functions with their gradients.

Each takes `logits [rows, vocab]`, which it may write to, and the rows' targets; and returns each row's loss, weighted,
with the gradient of their sum. What a batch's loss is divided by is the trainer's affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array
from treadle_plugin_api.loss import Floats, Loss, RowLosses, Targets


def cross_entropy(logits: Array, targets: Targets, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> RowLosses:
    """Return -log p(target).

    label_smoothing (Szegedy et al. 2016) gives that share of the target's weight to all tokens evenly; z_loss times
    log(Z)^2, Z the softmax's denominator, is added (PaLM, Chowdhery et al. 2022).
    """
    vocab = logits.shape[1]
    mean_logits = np.mean(logits, axis=1, dtype=np.float64) if label_smoothing else None
    probabilities, logprobs, log_z = _softmax(logits, targets.ids)
    losses = -logprobs if mean_logits is None else -(1 - label_smoothing) * logprobs
    if mean_logits is not None:
        losses += label_smoothing * (log_z - mean_logits)
    if z_loss:
        losses += z_loss * log_z * log_z
        probabilities *= (1 + 2 * z_loss * log_z)[:, None].astype(logits.dtype)
    if label_smoothing:
        probabilities -= label_smoothing / vocab
    probabilities[np.arange(len(logits)), targets.ids] -= 1 - label_smoothing
    probabilities *= targets.weights[:, None].astype(logits.dtype)
    return RowLosses(losses * targets.weights, probabilities, logprobs)


def importance_sampling(logits: Array, targets: Targets) -> RowLosses:
    """Return -advantage * p(target) / p_old(target): its gradient is the policy gradient of samples from p_old."""
    old_logprobs, advantages = targets.policy_inputs()
    probabilities, logprobs, _ = _softmax(logits, targets.ids)
    losses = -advantages * np.exp(logprobs - old_logprobs) * targets.weights
    return _through_logprobs(probabilities, targets.ids, losses, losses, logprobs)


def ppo(logits: Array, targets: Targets, *, clip_range: float = 0.2) -> RowLosses:
    """Return -min(r A, clip(r, 1 - clip_range, 1 + clip_range) A), r = p(target) / p_old(target) (Schulman 2017)."""
    old_logprobs, advantages = targets.policy_inputs()
    probabilities, logprobs, _ = _softmax(logits, targets.ids)
    ratios = np.exp(logprobs - old_logprobs)
    free = ratios * advantages
    clipped = np.clip(ratios, 1 - clip_range, 1 + clip_range) * advantages
    slopes = np.where(free <= clipped, -free, 0) * targets.weights  # r is its own derivative by log p
    return _through_logprobs(probabilities, targets.ids, -np.minimum(free, clipped) * targets.weights, slopes, logprobs)


LOSSES: Mapping[str, Loss] = MappingProxyType({
    loss.name: loss
    for loss in (
        Loss("cross_entropy", cross_entropy, {"label_smoothing": (0, 1), "z_loss": (0, math.inf)}),
        Loss("importance_sampling", importance_sampling),
        Loss("ppo", ppo, {"clip_range": (0, 1)}),
    )
})  # fmt: skip


def _softmax(logits: Array, ids: NDArray[np.int64]) -> tuple[Array, Floats, Floats]:
    """Return probabilities `[rows, vocab]` in the place of logits, log p(ids) and log Z, both `[rows] float64`."""
    rows = np.arange(len(logits))
    highest = np.maximum.reduce(logits, axis=1, keepdims=True)  # [rows, 1]
    logits -= highest
    chosen = logits[rows, ids].astype(np.float64)
    np.exp(logits, out=logits)
    totals = np.add.reduce(logits, axis=1, keepdims=True)  # [rows, 1]
    logits /= totals
    log_totals = np.log(totals[:, 0].astype(np.float64))
    return logits, chosen - log_totals, log_totals + highest[:, 0]


def _through_logprobs(
    probabilities: Array, ids: NDArray[np.int64], losses: Floats, slopes: Floats, logprobs: Floats
) -> RowLosses:
    """Take slopes `[rows]`, the losses' derivatives by log p(ids), on to the logits."""
    dlogits = np.negative(probabilities, out=probabilities)
    dlogits[np.arange(len(ids)), ids] += 1
    dlogits *= slopes[:, None].astype(dlogits.dtype)
    return RowLosses(losses, dlogits, logprobs)
