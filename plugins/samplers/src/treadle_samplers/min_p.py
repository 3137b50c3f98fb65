"""Min-p."""

from __future__ import annotations

import math
from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import keep_within


class MinP(Stage):
    """Keep the tokens at least m times as likely as the most likely one.

    Formula: p >= m * max p, which is l >= max l + ln m (Nguyen et al.: Turning Up the Heat: Min-p Sampling for Creative
    and Coherent LLM Outputs, 2024). Inclusive, within a relative 1e-6. It needs no softmax: the cheapest filter.

    Edges: m = 1 keeps every token tied with the largest. Masked tokens stay masked. It runs after temperature, so a
    low temperature makes it stricter (llama.cpp runs it before: say so with `order`).
    """

    name = "min_p"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    min_p: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.05, gt=0, le=1, description="smallest probability, as a share of the largest"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The likely tokens, the rest masked."""
        return keep_within(logits, math.log(self.min_p), context)
