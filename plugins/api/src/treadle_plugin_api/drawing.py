"""Drawing from softmax of a row of logits, by the inverse of the cumulative distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_plugin_api.logits import Logits, finite

# What is summed at once before the token is looked for in there: a running sum takes some twenty times as long as a
# plain one, as each addition waits for the one before it.
_BLOCK = 256

# One logit of so many tells whether most are masked: to look at all of them costs two searches for the largest.
_LOOKED_AT = 128

# Up to this size of the largest logit, weights need no shift: sums of exp stay far from float32's ends, and what is too
# small for it beside the largest is so with a shift.
_PLAIN_LOGIT = 30.0


class Draw(Protocol):
    """What `draw` is; a backend may have a faster one."""

    def __call__(self, logits: Logits, u: float, empty: Callable[[], Logits]) -> tuple[int, float]:
        """See `draw`."""


def draw(logits: Logits, u: float, empty: Callable[[], Logits]) -> tuple[int, float]:
    """Draw from softmax of `logits` [n] float32 by a uniform u of (0, 1): the index, and its probability.

    The first one, in ascending order, at which the running sum of weights exceeds the share u of all. Weights are
    float32 as logits are, and summed in float64. `empty` lends a row of n or more. Raises ValueError where none is
    finite, or one NaN or +inf.
    """
    if 2 * np.count_nonzero(logits[::_LOOKED_AT] > -np.inf) > len(logits) // _LOOKED_AT:
        return _draw(logits, u, empty()[: len(logits)])  # masked tokens weigh 0
    ids = finite(logits)
    values = logits[ids]
    if not len(ids):
        raise nothing_to_draw()
    index, probability = _draw(values, u, values)
    return int(ids[index]), probability


def _draw(values: Logits, u: float, found: Logits) -> tuple[int, float]:
    """Draw an index of `values` [n]; `found` [n] is overwritten, and may be `values`."""
    largest = values.max()
    if not math.isfinite(largest):
        raise nothing_to_draw()
    if abs(largest) > _PLAIN_LOGIT:
        values = np.subtract(values, largest, out=found)
    np.exp(values, out=found)  # in float32: as exact as the logits are, at a third of the time
    sums = np.cumsum(_block_sums(found))
    target = u * sums[-1]
    block = _first_above(sums, target)
    before = sums[block - 1] if block else 0.0
    start = block * _BLOCK
    running = np.cumsum(found[start : start + _BLOCK], dtype=np.float64)
    index = start + _first_above(before + running, target)
    return index, float(found[index] / sums[-1])


def nothing_to_draw() -> ValueError:
    """Say that a row of logits has nothing to draw from."""
    return ValueError("nothing can be drawn: all logits are masked, or one is NaN or +inf")


def _block_sums(found: Logits) -> NDArray[np.float64]:
    """Sum of each `_BLOCK` of `found` [n], the last of which may be shorter; float32 would lose small ones."""
    whole = len(found) // _BLOCK * _BLOCK
    blocks = found[:whole].reshape(-1, _BLOCK)
    sums: NDArray[np.float64] = np.einsum("ij->i", blocks, dtype=np.float64)  # three quarters of what `sum` takes
    return sums if whole == len(found) else np.append(sums, found[whole:].sum(dtype=np.float64))


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """First index whose running sum exceeds `target`; where rounding leaves none, the last that adds to the sum."""
    return int(min(sums.searchsorted(target, side="right"), sums.searchsorted(sums[-1])))
