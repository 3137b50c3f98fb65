"""Top-a."""

from __future__ import annotations

import math
from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import keep_within
from treadle_samplers.weights import log_total


class TopA(Stage):
    """Keep the tokens with at least a times the square of the largest probability.

    Formula: p >= a * (max p)^2 (BlinkDL's RWKV sampler, 2022; also in exllamav2 and KoboldAI). The surer the model, the
    stricter. Inclusive, within a relative 1e-6.

    Edges: the most likely token always passes, with all tied with it. Probabilities are of the tokens not masked.
    """

    name = "top_a"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_a: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.2, gt=0, le=1, description="factor on the squared largest probability"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The likely tokens, the rest masked."""
        # max p = 1 / sum w, so p / max p >= a * max p.
        return keep_within(logits, math.log(self.top_a) - log_total(logits), context)
