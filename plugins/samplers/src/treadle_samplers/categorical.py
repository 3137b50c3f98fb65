"""Drawing a token from the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import Logits, SamplingContext, Select, finite

from treadle_samplers.weights import BLOCK, block_sums, weights


class Categorical(Select):
    """Draw a token from softmax of the logits, by the inverse of the cumulative distribution.

    Formula: with weights w_i = exp(l_i - max l) over the finite logits in ascending id order and one uniform u of
    (0, 1), the first token whose running sum exceeds u * sum w. Weights and sums are float64: float32 sums lose the
    tail of a large vocabulary. One uniform a token costs far less than Gumbel noise for every id and draws from the
    same distribution.

    Edges: a masked token, or one whose weight underflows to 0, is never chosen; with one finite logit that one is.
    """

    name = "categorical"
    api_version = 1

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the drawn token."""
        kept = np.count_nonzero(logits > -np.inf)
        if kept > BLOCK:
            return _draw(logits, context.uniform())  # masked tokens weigh 0
        ids = finite(logits)
        return int(ids[_draw(logits[ids], context.uniform())])


def _draw(values: Logits, u: float) -> int:
    """Index of the first of `values` [n] float32 at which the running sum of weights exceeds the share `u` of all."""
    largest = values.max()
    sums = np.cumsum(block_sums(values, largest))
    target = u * sums[-1]
    block = _first_above(sums, target)
    before = sums[block - 1] if block else 0.0
    start = block * BLOCK
    return start + _first_above(before + np.cumsum(weights(values[start : start + BLOCK], largest)), target)


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """First index whose running sum exceeds `target`; where rounding leaves none, the last that adds to the sum."""
    return int(min(sums.searchsorted(target, side="right"), sums.searchsorted(sums[-1])))
