"""Softmax weights of long rows, with few temporaries: those of a vocabulary's size cost as much as the arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import Logits, finite
from treadle_plugin_api.logits import Ids

# What is summed at once: 64 KiB of float64.
BLOCK = 8192

# exp of anything lower is 0 in float64; keeps 0 * -inf, which is no number, out of sums.
_LOWEST = -746.0


def weights(values: Logits, largest: np.float32) -> NDArray[np.float64]:
    """exp(l - largest) of `values` [n] float32 as float64; masked ones give 0."""
    shifted = values.astype(np.float64)
    shifted -= largest
    return np.exp(shifted, out=shifted)


def block_sums(values: Logits, largest: np.float32) -> NDArray[np.float64]:
    """Sum of the weights of each `BLOCK` of `values` [n] float32, in order: [blocks] float64."""
    found = weights(values, largest)
    return np.array([found[start : start + BLOCK].sum() for start in range(0, len(found), BLOCK)])


def compact(logits: Logits) -> tuple[Logits, Ids | None]:
    """The unmasked of `logits` [vocab] float32 and their ids, ascending; the whole row and None if most are unmasked.

    What a filter before has left is a few tokens: arithmetic on the masked rest would cost more than on all tokens.
    """
    if 2 * np.count_nonzero(logits > -np.inf) > len(logits):
        return logits, None
    ids = finite(logits)
    return logits[ids], ids


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over softmax weights w = exp(l - max l) of a row.

    Attributes:
        log_total: ln sum w, so that ln p = l - max l - log_total.
        entropy: -sum p ln p, in nats.
        log_squares: ln sum w^2.
    """

    log_total: float
    entropy: float
    log_squares: float


def moments(logits: Logits) -> Moments:
    """The moments of `logits` [vocab] float32, in float64."""
    values, _ = compact(logits)
    largest = values.max()
    total = weighted = squares = 0.0
    for start in range(0, len(values), BLOCK):
        shifted = values[start : start + BLOCK].astype(np.float64)
        shifted -= largest
        np.maximum(shifted, _LOWEST, out=shifted)
        w = np.exp(shifted)
        total += float(w.sum())
        weighted += float(w.dot(shifted))
        squares += float(w.dot(w))
    log_total = math.log(total)
    return Moments(log_total, max(log_total - weighted / total, 0.0), math.log(squares))


def log_total(logits: Logits) -> float:
    """Ln sum exp(l - max l) of `logits` [vocab] float32, so that ln p = l - max l - log_total."""
    values, _ = compact(logits)
    return math.log(block_sums(values, values.max()).sum())
