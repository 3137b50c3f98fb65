"""Top-k."""

from __future__ import annotations

from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, keep, top_ids


class TopK(Stage):
    """Keep the k most likely tokens.

    Formula: the first k in the order (logit descending, id ascending) (Fan, Lewis, Dauphin: Hierarchical Neural Story
    Generation, 2018).

    Edges: exactly k are kept: of logits equal to the k-th largest those with the lowest ids. k above the vocabulary, or
    above the number of tokens not masked, keeps all of them. The plain knob takes 0 or -1 for off; the stage itself
    starts at 1.
    """

    name = "top_k"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    top_k: Annotated[int, Knob(off=(0, -1))] = Field(
        default=40, ge=1, le=2**31 - 1, description="number of tokens to keep"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The k largest logits, the rest masked."""
        if self.top_k >= len(logits):
            return logits
        return keep(logits, top_ids(logits, self.top_k, ordered=False), context.empty())
