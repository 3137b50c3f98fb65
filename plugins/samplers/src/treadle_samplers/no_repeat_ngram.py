"""No n-gram twice."""

from __future__ import annotations

from typing import Annotated, Any

from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage

from treadle_samplers.history import SuffixMatches
from treadle_samplers.token_ids import without


class NoRepeatNgram(Stage):
    """Mask every token that would complete an n-gram for the second time.

    Formula: l of x = -inf if the last n - 1 tokens with x after them already occur in prompt or output (Paulus, Xiong,
    Socher: A Deep Reinforced Model for Abstractive Summarization, 2017; as in transformers).

    Edges: n = 1 masks every token that came before, those of the prompt included. A history shorter than n masks
    nothing. Where everything that is left would repeat, it stays: a token has to be chosen.
    """

    name = "no_repeat_ngram"
    kind = "mask"
    api_version = 1

    no_repeat_ngram_size: Annotated[int, Knob(off=(0,))] = Field(
        default=3, ge=1, le=2**31 - 1, description="n, the number of tokens that may not come twice in a row of n"
    )

    def start(self, context: SamplingContext) -> SuffixMatches:
        """Matches in the history so far."""
        return SuffixMatches.of(context)

    def accept(self, state: SuffixMatches, token_id: int) -> None:
        """One token more."""
        state.append(token_id)

    def clone(self, state: SuffixMatches) -> SuffixMatches:
        """A history of its own."""
        return state.copy()

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without what would repeat."""
        size = self.no_repeat_ngram_size
        banned = state.ids if size == 1 else state.followers(size - 1)
        if not len(banned):
            return logits
        out = without(logits, banned, context)
        return out if out.max() > -float("inf") else logits
