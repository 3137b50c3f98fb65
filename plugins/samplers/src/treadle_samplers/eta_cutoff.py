"""Eta sampling."""

from __future__ import annotations

import math
from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import keep_within
from treadle_samplers.weights import moments


class EtaCutoff(Stage):
    """Keep the tokens of at least a probability that falls as the distribution flattens.

    Formula: p >= min(e, sqrt(e) * exp(-H)), H the entropy in nats (Hewitt, Manning, Liang: Truncation Sampling as
    Language Model Desmoothing, 2022). Inclusive, within a relative 1e-6. Useful values are 3e-4 to 4e-3.

    Edges: where no token is that likely, the most likely one is kept, lowest id among equals. Probabilities and entropy
    are of the tokens not masked.
    """

    name = "eta_cutoff"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    eta_cutoff: Annotated[float, Knob(off=(0.0,))] = Field(
        default=2e-3, gt=0, le=1, description="e, the largest probability that may be asked of a token"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The likely tokens, the rest masked."""
        sums, log_e = moments(logits), math.log(self.eta_cutoff)
        return keep_within(logits, min(log_e, log_e / 2 - sums.entropy) + sums.log_total, context)
