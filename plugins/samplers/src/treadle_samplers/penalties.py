"""The three penalties on tokens that came before."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage
from treadle_plugin_api.logits import Ids

_LARGEST = float(np.finfo(np.float32).max)


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each is in the output.

    Attributes:
        ids: [tokens] int64 and room for more; the first `len` are used.
        counts: how often each was sampled: 0 for one of the prompt alone.
    """

    def __init__(self, prompt_ids: Ids) -> None:
        self.ids = np.unique(prompt_ids)
        self.counts = np.zeros(len(self.ids), dtype=np.int64)
        self._place_of = {token_id: place for place, token_id in enumerate(self.ids.tolist())}

    def __len__(self) -> int:
        return len(self._place_of)

    def add(self, token_id: int) -> None:
        """Count a sampled token."""
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self.ids):
            spare = np.zeros(max(64, place), dtype=np.int64)
            self.ids, self.counts = np.concatenate([self.ids, spare]), np.concatenate([self.counts, spare])
        self.ids[place] = token_id
        self.counts[place] += 1

    def copy(self) -> TokenCounts:
        """Counts that go on by themselves."""
        other = TokenCounts(self.ids[:0])
        other.ids, other.counts, other._place_of = self.ids.copy(), self.counts.copy(), self._place_of.copy()
        return other


class Penalties(Stage):
    """Make tokens that came before less likely: by a factor, for being there, and for each time.

    Formula, for each token that occurs, in this order: l = l / r if l > 0 else l * r, once, over prompt and output
    (Keskar et al.: CTRL, 2019); l -= f * count, and l -= q if count > 0, over the output alone (OpenAI's API; vLLM).

    Edges: r = 1, f = 0 and q = 0 change nothing; r below 1 and negative f and q make repetition likelier. A logit of 0
    is left by r. Masked tokens stay masked. Results are clipped to float32's range, so that no r makes an infinity.
    """

    name = "penalties"
    kind = "penalty"
    api_version = 1

    repetition_penalty: Annotated[float, Knob(off=(1.0,))] = Field(
        default=1.0, gt=0, description="r, divisor of positive and factor of negative logits; 1 changes nothing"
    )
    presence_penalty: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.0, ge=-2, le=2, description="q, taken off once if the token is in the output"
    )
    frequency_penalty: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.0, ge=-2, le=2, description="f, taken off for each time the token is in the output"
    )

    def start(self, context: SamplingContext) -> TokenCounts:
        """Counts of the history so far."""
        counts = TokenCounts(context.prompt_ids)
        for token_id in context.output_ids.tolist():
            counts.add(token_id)
        return counts

    def accept(self, state: TokenCounts, token_id: int) -> None:
        """One token more."""
        state.add(token_id)

    def clone(self, state: TokenCounts) -> TokenCounts:
        """Counts of its own."""
        return state.copy()

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The penalised logits."""
        ids, counts = state.ids[: len(state)], state.counts[: len(state)]
        values = logits[ids].astype(np.float64)
        unmasked = values > -np.inf
        ids, counts, values = ids[unmasked], counts[unmasked], values[unmasked]
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        values -= self.frequency_penalty * counts + self.presence_penalty * (counts > 0)
        out = context.empty()
        np.copyto(out, logits)
        out[ids] = np.clip(values, -_LARGEST, _LARGEST)
        return out
