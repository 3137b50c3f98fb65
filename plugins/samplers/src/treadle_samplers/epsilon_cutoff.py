"""Epsilon sampling."""

from __future__ import annotations

import math
from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import keep_within
from treadle_samplers.weights import log_total


class EpsilonCutoff(Stage):
    """Keep the tokens of at least probability e.

    Formula: p >= e (Hewitt, Manning, Liang: Truncation Sampling as Language Model Desmoothing, 2022). Inclusive, within
    a relative 1e-6. Useful values are 3e-4 to 9e-4.

    Edges: where no token is as likely as e, the most likely one is kept, lowest id among equals. e = 1 therefore keeps
    one. Probabilities are of the tokens not masked.
    """

    name = "epsilon_cutoff"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    epsilon_cutoff: Annotated[float, Knob(off=(0.0,))] = Field(
        default=3e-4, gt=0, le=1, description="smallest probability to keep"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The likely tokens, the rest masked."""
        return keep_within(logits, math.log(self.epsilon_cutoff) + log_total(logits), context)
