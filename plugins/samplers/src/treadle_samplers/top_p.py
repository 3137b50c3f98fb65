"""Top-p, or nucleus sampling."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import MASS_SLACK, Field, Knob, Logits, SamplingContext, Stage, finite, keep, softmax64, top_ids
from treadle_plugin_api.logits import Ids

from treadle_samplers.weights import block_sums, weights

# As many of the best tokens are sorted; a nucleus is rarely larger, and one that is is found by partition.
_SORTED_AT_MOST = 1024

# The slack must not turn a tiny p into a mass that no token at all reaches.
_SMALLEST_MASS = 1e-12


class TopP(Stage):
    """Keep the smallest set of most likely tokens whose probability reaches p.

    Formula: in the order (logit descending, id ascending) the shortest prefix with mass >= p - 1e-6 (Holtzman et al.:
    The Curious Case of Neural Text Degeneration, 2019). The slack keeps decimal boundaries: .5 and .3 reach .8, though
    their floating-point sum is just under it.

    Edges: the token that crosses p is kept, so there is always one. p = 1 keeps every token, however unlikely. p = 0 is
    refused, since some take it for off and others for greedy: use `temperature=0` or `top_k=1`. Mass is relative to the
    tokens not masked so far.
    """

    name = "top_p"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_p: Annotated[float, Knob(off=(1.0,))] = Field(
        default=0.95, gt=0, le=1, description="probability mass to keep; 1 keeps all"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The nucleus, the rest masked."""
        if self.top_p == 1.0:
            return logits
        ids = finite(logits)
        mass = max(self.top_p - MASS_SLACK, _SMALLEST_MASS)
        if len(ids) > _SORTED_AT_MOST:
            return keep(logits, _large_nucleus(logits, mass), context.empty())
        values = logits[ids]
        return keep(logits, ids[_prefix(np.arange(len(ids)), values, softmax64(values), mass)], context.empty())


def _large_nucleus(logits: Logits, mass: float) -> Ids:
    """Ids of the nucleus of `logits` [vocab] float32 with more unmasked tokens than are worth sorting."""
    largest = logits.max()
    best = top_ids(logits, _SORTED_AT_MOST)
    sums = np.cumsum(weights(logits[best], largest)) / block_sums(logits, largest).sum()
    if sums[-1] >= mass:
        return best[: int(sums.searchsorted(mass)) + 1]
    ids = finite(logits)
    values = logits[ids]
    return ids[_nucleus(values, softmax64(values), mass)]


def _nucleus(values: Logits, probabilities: NDArray[np.float64], mass: float) -> Ids:
    """Indices of the fewest largest `values` [n] float32 whose `probabilities` [n] reach `mass`: [kept] int64.

    A selection, not a sort: each round splits the undecided by their median and settles one half, so work is linear.
    """
    undecided = np.arange(len(values))
    kept: list[Ids] = []
    while len(undecided) > _SORTED_AT_MOST:
        level = values[undecided]
        pivot = np.partition(level, len(level) // 2)[len(level) // 2]
        above, tied = undecided[level > pivot], undecided[level == pivot]
        mass_above = float(probabilities[above].sum())
        if mass_above >= mass:
            undecided = above
            continue
        kept.append(above)
        mass -= mass_above
        mass_tied = float(probabilities[tied].sum())
        if mass_tied >= mass:
            undecided = tied
            break
        kept.append(tied)
        mass -= mass_tied
        undecided = undecided[level < pivot]
    return np.concatenate([*kept, _prefix(undecided, values, probabilities, mass)])


def _prefix(ids: Ids, values: Logits, probabilities: NDArray[np.float64], mass: float) -> Ids:
    """The shortest prefix of ascending `ids`, best first, that holds `mass`."""
    if len(ids) <= _SORTED_AT_MOST:  # longer ones are all equal: already in order
        ids = ids[np.argsort(-values[ids], kind="stable")]
    sums = np.cumsum(probabilities[ids])
    return ids[: int(sums.searchsorted(mass)) + 1]
