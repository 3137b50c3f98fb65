"""Top-H."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import MASS_SLACK, Field, Knob, Logits, SamplingContext, Stage, keep, softmax64, top_ids

# As in the paper's and in transformers' code: the tokens past these are dropped, and do not count.
_NUM_TOKENS = 100


class TopH(Stage):
    """Keep the most likely tokens as long as their share of the entropy allows.

    Formula: with p over the 100 most likely tokens alone and H their entropy, in the order (logit descending, id
    ascending) the longest prefix with sum of -p ln p <= h * H (Baghaei Potraghloo et al.: Top-H Decoding, 2025;
    transformers). Within 1e-6.

    Edges: the most likely token is always kept. h = 1 keeps the 100, so off is 0, not 1. Fewer than 100 unmasked tokens
    are all considered. Of equal logits the lowest ids come first.
    """

    name = "top_h"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_h: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.4, gt=0, le=1, description="share of the entropy that the kept tokens may have"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The first tokens, the rest masked."""
        ids = top_ids(logits, _NUM_TOKENS)
        p = softmax64(logits[ids])
        sums = np.cumsum(-p * np.log(np.maximum(p, np.finfo(np.float64).tiny)))
        num_kept = int(np.searchsorted(sums, self.top_h * sums[-1] + MASS_SLACK, side="right"))
        return keep(logits, ids[: max(num_kept, 1)], context.empty())
