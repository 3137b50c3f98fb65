"""XTC: exclude top choices."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import ids_within
from treadle_samplers.weights import log_total


class Xtc(Stage):
    """Now and then, drop all likely choices but the least likely of them.

    Formula: with a uniform u < P, among the tokens with p >= t drop all but the last in the order (logit descending, id
    ascending); less likely ones are untouched (p-e-w: text-generation-webui #6335, 2024; as in llama.cpp). Inclusive,
    within a relative 1e-6.

    Edges: fewer than two candidates change nothing, so t above 0.5 never would and is refused. t = 0 makes every
    unmasked token a candidate: the least likely alone is left. P = 1 always acts. No token is protected, neither the
    end of text nor newlines. The die is this stage's own: one uniform a token, from (seed, choice, position, xtc).
    """

    name = "xtc"
    kind = "filter"
    api_version = 1

    xtc_probability: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.5, gt=0, le=1, description="P, the probability that it acts on a token"
    )
    xtc_threshold: Annotated[float, Knob()] = Field(
        default=0.1, ge=0, le=0.5, description="t, the probability that makes a token a top choice"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without the top choices, if the die says so."""
        if context.uniform() >= self.xtc_probability:
            return logits
        log_threshold = math.log(self.xtc_threshold) if self.xtc_threshold > 0 else -1e300
        total = log_total(logits) if self.xtc_threshold > 0 else 0.0
        ids = ids_within(logits, log_threshold + total)
        if len(ids) < 2:
            return logits
        values = logits[ids]
        last = np.flatnonzero(values == values.min())[-1]
        out = context.empty()
        np.copyto(out, logits)
        out[np.delete(ids, last)] = -np.inf
        return out
