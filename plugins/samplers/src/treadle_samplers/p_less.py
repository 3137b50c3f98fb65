"""P-less sampling."""

from __future__ import annotations

from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.cutoff import keep_within
from treadle_samplers.weights import moments


class PLess(Stage):
    """Keep the tokens at least as likely as two draws are to agree.

    Formula: p >= sum p^2, the chance that two draws of the distribution are the same token; no parameter to set (Tan et
    al.: p-less Sampling: A Robust Hyperparameter-free Approach for LLM Decoding, 2025). Inclusive, within a relative
    1e-6.

    Edges: the most likely token always passes, as max p >= sum p^2. Of equal logits all pass.
    """

    name = "p_less"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    p_less: Annotated[bool, Knob(off=(False,))] = Field(default=True, description="whether to filter at all")

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The likely tokens, the rest masked."""
        if not self.p_less:
            return logits
        sums = moments(logits)
        return keep_within(logits, sums.log_squares - sums.log_total, context)
