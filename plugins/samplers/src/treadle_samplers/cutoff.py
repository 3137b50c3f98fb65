"""What every filter by a probability shares: tokens down to a distance from the most likely one.

A bound on p is a bound on l, since ln p = l - max l - ln sum exp(l - max l); so no filter needs all probabilities.
"""

from __future__ import annotations

import numpy as np
from treadle_plugin_api import MASS_SLACK, Logits, SamplingContext, keep, top_ids
from treadle_plugin_api.logits import Ids

_LOWEST_FLOAT32 = float(np.finfo(np.float32).min)


def ids_within(logits: Logits, log_ratio: float) -> Ids:
    """Ids of `logits` [vocab] float32 with p >= exp(log_ratio) * max p, ascending; the most likely one at least.

    The bound itself is within it: the slack is relative here, or a bound of one in a million would let everything pass.
    """
    bound = float(logits.max()) + log_ratio - MASS_SLACK
    ids = np.flatnonzero(logits >= np.float32(max(bound, _LOWEST_FLOAT32)))
    return ids if len(ids) else top_ids(logits, 1)


def keep_within(logits: Logits, log_ratio: float, context: SamplingContext) -> Logits:
    """`logits` [vocab] float32 with everything under exp(log_ratio) * max p masked."""
    ids = ids_within(logits, log_ratio)
    return logits if len(ids) == len(logits) else keep(logits, ids, context.empty())
