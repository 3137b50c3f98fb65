"""Tail-free sampling."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import MASS_SLACK, Field, Knob, Logits, SamplingContext, Stage, keep, top_ids

from treadle_samplers.weights import weights

# As many of the best tokens are sorted. What the rest adds to the curvature is known to be less than twice the
# probability of the last of them, nearly always less than the slack.
_NUM_SORTED = 4096


class TailFree(Stage):
    """Cut the tail off where the sorted probabilities stop bending.

    Formula: with p sorted in the order (logit descending, id ascending) and the curvature c_i = |p_i - 2 p_{i+1} +
    p_{i+2}|, normalised to sum to 1, token i + 1 is kept while c_0 + ... + c_i <= z (Phenix, Egan: Tail Free Sampling,
    2019; centred as in KoboldAI's and aphrodite's code). Within 1e-6.

    Edges: the most likely token is always kept, the last one never. Fewer than three unmasked tokens have no curvature,
    and equal ones none either: all are kept. z = 1 is off, and so is 0, as in exllamav2.
    """

    name = "tfs"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    tfs: Annotated[float, Knob(off=(1.0, 0.0))] = Field(
        default=0.95, gt=0, le=1, description="z, the share of the curvature to keep; 1 keeps all"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The head of the distribution, the rest masked."""
        if self.tfs == 1.0:
            return logits
        ids = top_ids(logits, _NUM_SORTED)
        w = weights(logits[ids], logits[ids[0]])
        bends = np.abs(np.diff(w, 2))
        if len(ids) == _NUM_SORTED and 2 * w[-1] > MASS_SLACK * bends.sum():
            # Values alone, and only for a row this flat: a sort of ids would cost ten times as much.
            w = weights(np.sort(logits[logits > -np.inf])[::-1], logits[ids[0]])
            bends = np.abs(np.diff(w, 2))
        if not bends.sum() > 0:
            return logits
        num_kept = 1 + int(np.searchsorted(np.cumsum(bends), self.tfs * bends.sum() * (1 + MASS_SLACK), side="right"))
        return keep(logits, ids[:num_kept] if num_kept <= len(ids) else top_ids(logits, num_kept), context.empty())
