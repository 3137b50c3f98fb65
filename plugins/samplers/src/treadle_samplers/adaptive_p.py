"""Adaptive-p: a steady probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Select

from treadle_samplers.weights import compact, log_total

_WIDTH = 0.3  # distance in probability at which the core ends
_PEAK = 5.0  # logit at the target
_SHARPNESS = 10.0


@dataclass(slots=True)
class AdaptiveState:
    """What a choice remembers.

    Attributes:
        weighted_sum: sum of the chosen tokens' probabilities, each weighted by decay^age.
        total_weight: sum of those weights.
        drawn: the token of the last draw and its probability before the transform; None once it was accepted.
    """

    weighted_sum: float
    total_weight: float
    drawn: tuple[int, float] | None = None


class AdaptiveP(Select):
    """Draw so that the probability of the chosen tokens stays near a target.

    Formula (MrJackSpade: Adaptive-P, 2025; as in llama.cpp): the next aim is a = clamp(2 * target - mean, 0, 1), mean
    the moving average of the chosen tokens' probabilities, which starts at the target and forgets by `adaptive_decay`.
    With d = |p - a| / 0.3 the logits become 5 - 10 d^2 / (1 + d); a token is drawn from their softmax (inverse CDF in
    ascending id order, one uniform). When it is accepted, its p before the transform joins the average.

    Edges: masked tokens stay masked. It favours tokens near the aim, not likely ones: put `min_p` before it, or the
    tail of a large vocabulary wins by its mass. A token that was not drawn here moves nothing. Temperature 0 is greedy
    instead. The plain knob takes -1 for off.
    """

    name = "adaptive_p"
    api_version = 1

    adaptive_target: Annotated[float, Knob(off=(-1.0,))] = Field(
        default=0.5, ge=0, le=1, description="mean probability that the chosen tokens should have"
    )
    adaptive_decay: Annotated[float, Knob()] = Field(
        default=0.9, ge=0, le=0.99, description="how slowly the mean forgets: weight kept from token to token"
    )

    def start(self, context: SamplingContext) -> AdaptiveState:
        """A mean that is the target, as if it had always been met."""
        weight = 1 / (1 - self.adaptive_decay)
        return AdaptiveState(self.adaptive_target * weight, weight)

    def accept(self, state: AdaptiveState, token_id: int) -> None:
        """Let the token's probability join the mean."""
        if state.drawn is not None and state.drawn[0] == token_id:
            state.weighted_sum = state.drawn[1] + self.adaptive_decay * state.weighted_sum
            state.total_weight = 1 + self.adaptive_decay * state.total_weight
        state.drawn = None

    def clone(self, state: AdaptiveState) -> AdaptiveState:
        """A copy that moves by itself."""
        return AdaptiveState(state.weighted_sum, state.total_weight, state.drawn)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the drawn token; notes its probability."""
        transformed = self.distribution(logits, context, state)
        token_id, _ = context.draw(transformed)
        log_p = float(logits[token_id]) - float(logits.max()) - log_total(logits)
        state.drawn = (token_id, float(np.exp(log_p)))
        return token_id

    def distribution(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The transformed logits."""
        aim = min(max(2 * self.adaptive_target - state.weighted_sum / state.total_weight, 0.0), 1.0)
        values, ids = compact(logits)
        with np.errstate(over="ignore"):
            d = values - values.max()
        d -= np.float32(log_total(values))
        np.exp(d, out=d)
        d -= np.float32(aim)
        np.abs(d, out=d)
        d /= np.float32(_WIDTH)
        bent = d * d
        bent /= 1 + d
        bent *= np.float32(-_SHARPNESS)
        bent += np.float32(_PEAK)
        out = context.empty()
        if ids is not None:
            out.fill(-np.inf)
            out[ids] = bent
            return out
        np.copyto(out, bent)
        out[logits == -np.inf] = -np.inf
        return out
