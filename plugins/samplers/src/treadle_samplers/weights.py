"""Softmax weights of long rows, with few temporaries: those of a vocabulary's size cost as much as the arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import Logits, SamplingContext, finite
from treadle_plugin_api.logits import Ids

# What is summed at once: 64 KiB of float64.
BLOCK = 8192

# What a draw sums at once before it looks for the token in there: a running sum takes some twenty times as long as a
# plain one, as each addition waits for the one before it.
_DRAWN_BLOCK = 256

# One logit of so many tells a draw whether most are masked: to look at all of them costs two searches for the largest.
_LOOKED_AT = 128

# Up to this size of the largest logit, weights need no shift: sums of exp stay far from float32's ends, and what is too
# small for it beside the largest is so with a shift.
_PLAIN_LOGIT = 30.0

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


def draw(logits: Logits, context: SamplingContext) -> tuple[int, float]:
    """Draw from softmax of `logits` [n] float32 by the context's next uniform u: the index, and its probability.

    The first one, in ascending order, at which the running sum of weights exceeds the share u of all.
    """
    if 2 * np.count_nonzero(logits[::_LOOKED_AT] > -np.inf) > len(logits) // _LOOKED_AT:
        room = context.empty()[: len(logits)]  # lent again and again, it stays in the processor's cache
        return _draw(logits, context.uniform(), room)  # masked tokens weigh 0
    ids = finite(logits)
    values = logits[ids]
    index, probability = _draw(values, context.uniform(), values)
    return int(ids[index]), probability


def _draw(values: Logits, u: float, found: Logits) -> tuple[int, float]:
    """Draw an index of `values` [n]; `found` [n] is overwritten, and may be `values`."""
    largest = values.max()
    if abs(largest) > _PLAIN_LOGIT:
        values = np.subtract(values, largest, out=found)
    np.exp(values, out=found)  # in float32: as exact as the logits are, at a third of the time
    sums = np.cumsum(_drawn_block_sums(found))
    target = u * sums[-1]
    block = _first_above(sums, target)
    before = sums[block - 1] if block else 0.0
    start = block * _DRAWN_BLOCK
    running = np.cumsum(found[start : start + _DRAWN_BLOCK], dtype=np.float64)
    index = start + _first_above(before + running, target)
    return index, float(found[index] / sums[-1])


def _drawn_block_sums(found: Logits) -> NDArray[np.float64]:
    """Sum of each `_DRAWN_BLOCK` of `found` [n], the last of which may be shorter; float32 would lose small ones."""
    whole = len(found) // _DRAWN_BLOCK * _DRAWN_BLOCK
    blocks = found[:whole].reshape(-1, _DRAWN_BLOCK)
    sums: NDArray[np.float64] = np.einsum("ij->i", blocks, dtype=np.float64)  # three quarters of what `sum` takes
    return sums if whole == len(found) else np.append(sums, found[whole:].sum(dtype=np.float64))


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """First index whose running sum exceeds `target`; where rounding leaves none, the last that adds to the sum."""
    return int(min(sums.searchsorted(target, side="right"), sums.searchsorted(sums[-1])))
