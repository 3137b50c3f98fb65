"""Top-p, or nucleus sampling."""

from __future__ import annotations

from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, keep

from treadle_samplers.nucleus import nucleus
from treadle_samplers.weights import block_sums, compact, weights


class TopP(Stage):
    """Keep the smallest set of most likely tokens whose probability reaches p.

    Formula: in the order (logit descending, id ascending) the shortest prefix with mass >= p - 1e-6 (Holtzman et al.:
    The Curious Case of Neural Text Degeneration, 2019). The slack keeps decimal boundaries: .5 and .3 reach .8, though
    their floating-point sum is just under it.

    Edges: the token that crosses p is kept, so there is always one. p = 1 keeps every token, however unlikely. p = 0 is
    refused, since some take it for off and others for greedy: use `temperature=0` or `top_k=1`. Mass is relative to the
    tokens not masked so far.
    """

    name = "top_p"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_p: Annotated[float, Knob(off=(1.0,))] = Field(
        default=0.95, gt=0, le=1, description="probability mass to keep; 1 keeps all"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The nucleus, the rest masked."""
        if self.top_p == 1.0:
            return logits
        values, ids = compact(logits)
        largest = values.max()
        total = block_sums(values, largest).sum()
        kept = nucleus(values, lambda places: weights(values[places], largest) / total, self.top_p)
        return keep(logits, kept if ids is None else ids[kept], context.empty())
