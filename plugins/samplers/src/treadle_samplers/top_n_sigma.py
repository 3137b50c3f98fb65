"""Top-n-sigma."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, finite

from treadle_samplers.cutoff import keep_within


class TopNSigma(Stage):
    """Keep the logits within n standard deviations of the largest.

    Formula: l >= max l - n * std(l), the population's standard deviation over the unmasked logits, in float64 (Tang et
    al.: Top-nsigma: Not All Logits Are You Need, 2024). What it keeps does not depend on the temperature.

    Edges: masked tokens count for nothing. Where all logits are equal the deviation is 0 and all are kept. The plain
    knob takes 0 or -1 for off; the stage itself wants n above 0.
    """

    name = "top_n_sigma"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_n_sigma: Annotated[float, Knob(off=(0.0, -1.0))] = Field(
        default=1.0, gt=0, description="standard deviations below the largest logit that are kept"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits near the largest, the rest masked."""
        values = logits if logits.min() > -np.inf else logits[finite(logits)]
        deviation = float(values.std(dtype=np.float64))
        return keep_within(logits, max(-self.top_n_sigma * deviation, -1e300), context)
