"""The shortest prefix of an order that holds a given mass, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import MASS_SLACK, Logits, finite, top_ids
from treadle_plugin_api.logits import Ids

# As many of the best tokens are sorted; a nucleus is rarely larger, and one that is is found by partition.
_SORTED_AT_MOST = 1024

# The slack must not turn a tiny p into a mass that no token at all reaches.
_SMALLEST_MASS = 1e-12


def nucleus(scores: Logits, probabilities: Callable[[Ids], NDArray[np.float64]], mass: float) -> Ids:
    """Ids of the fewest best tokens whose probability reaches `mass`, within the slack: [kept] int64, in no order.

    Args:
        scores: the order, [vocab] float32: largest first, lowest id first among equals; masked tokens have -inf.
        probabilities: of some ids [n], as float64 [n]; those of all tokens with a score sum to 1.
        mass: above 0 and below 1.
    """
    mass = max(mass - MASS_SLACK, _SMALLEST_MASS)
    best = top_ids(scores, _SORTED_AT_MOST)
    sums = np.cumsum(probabilities(best))
    if sums[-1] >= mass or len(best) < _SORTED_AT_MOST:
        return best[: int(sums.searchsorted(mass)) + 1]
    ids = finite(scores)
    return ids[_partitioned(scores[ids], probabilities(ids), mass)]


def _partitioned(values: Logits, probabilities: NDArray[np.float64], mass: float) -> Ids:
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
