"""Drawing a token from the distribution."""

from __future__ import annotations

from typing import Any

from treadle_plugin_api import Logits, SamplingContext, Select


class Categorical(Select):
    """Draw a token from softmax of the logits, by the inverse of the cumulative distribution.

    Formula: with weights w_i = exp(l_i - max l) over the finite logits in ascending id order and one uniform u of
    (0, 1), the first token whose running sum exceeds u * sum w. Weights are float32 as logits are, and
    summed in float64: float32 sums lose the tail of a large vocabulary. One uniform a token costs far less than Gumbel
    noise for every id and draws from the same distribution.

    Edges: a masked token, or one whose weight underflows to 0, is never chosen; with one finite logit that one is.
    """

    name = "categorical"
    api_version = 1

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the drawn token."""
        return context.draw(logits)[0]
