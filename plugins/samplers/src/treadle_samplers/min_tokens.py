"""A lower bound on the output."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage


class MinTokens(Stage):
    """Keep the text from ending before `min_tokens` tokens were sampled.

    Formula: while fewer are out, every end-of-text id and every stop id of the request is masked, not just one of them.

    Edges: only output tokens count, never the prompt's. Where nothing but ends is left, by a mask before, they stay: a
    token has to be chosen. Ids past the vocabulary are passed over.
    """

    name = "min_tokens"
    kind = "mask"
    api_version = 1

    min_tokens: Annotated[int, Knob(off=(0,))] = Field(
        default=1, ge=1, le=2**31 - 1, description="number of tokens before the text may end"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without the ends of text, as long as that is due."""
        if context.num_outputs >= self.min_tokens:
            return logits
        ends = [token_id for token_id in context.eos_ids | context.stop_ids if 0 <= token_id < len(logits)]
        out = context.empty()
        np.copyto(out, logits)
        out[ends] = -np.inf
        return out if out.max() > -np.inf else logits
