"""Temperature, fixed or by the entropy."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, keep

from treadle_samplers.weights import moments

# Below this a division overflows float32 for ordinary logits, while the draw has long been the argmax.
GREEDY_BELOW = 1e-5
# Past float32's range a divisor would become inf, and 0 * inf is no number.
_LARGEST = 1e38


class Temperature(Stage):
    """Flatten (T > 1) or sharpen (T < 1) the distribution; with a range, by how unsure the model is.

    Formula: (l - max l) / T; the shift changes no probability and keeps the division from overflowing (Ackley, Hinton,
    Sejnowski: A Learning Algorithm for Boltzmann Machines, 1985). With `dynatemp_range` r above 0, T becomes lo + (hi -
    lo) * (H / ln n)^e with lo = max(T - r, 0) and hi = T + r, where H is the entropy in nats, n the number of tokens
    not masked and e `dynatemp_exponent` (kalomaze: dynamic temperature, 2023; as in llama.cpp).

    Edges: T = 0, and anything under 1e-5, keeps the largest logit alone (lowest id among equals); a chain that holds
    such a stage, whatever its range, becomes masks, penalties, greedy. A logit so far below the largest that the
    quotient overflows gets probability 0. The dynamic temperature depends on the place in the chain: here, all tokens
    not masked count; llama.cpp runs it after its filters. With one token left there is nothing to scale.
    """

    name = "temperature"
    kind = "transform"
    api_version = 1
    argmax_invariant = True

    temperature: Annotated[float, Knob(off=(1.0,))] = Field(
        default=1.0, ge=0, description="divisor of the logits; 1 changes nothing, 0 is greedy"
    )
    dynatemp_range: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.0, ge=0, description="how far the divisor may move up and down with the entropy; 0 fixes it"
    )
    dynatemp_exponent: Annotated[float, Knob()] = Field(
        default=1.0, ge=0, le=100, description="exponent on the entropy's share of the largest possible one"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The scaled logits."""
        out = context.empty()
        temperature = self._dynamic(logits) if self.dynatemp_range > 0 else self.temperature
        if temperature < GREEDY_BELOW:
            return keep(logits, np.array([logits.argmax()]), out)
        with np.errstate(over="ignore"):
            np.subtract(logits, logits.max(), out=out)
            np.divide(out, np.float32(min(temperature, _LARGEST)), out=out)
        return out

    def _dynamic(self, logits: Logits) -> float:
        """The temperature for this row."""
        num_tokens = np.count_nonzero(logits > -np.inf)
        if num_tokens < 2 or self.temperature < GREEDY_BELOW:
            return self.temperature
        lowest = min(max(self.temperature - self.dynatemp_range, 0.0), _LARGEST)
        highest = min(self.temperature + self.dynatemp_range, _LARGEST)
        share = min(moments(logits).entropy / math.log(num_tokens), 1.0)
        return lowest + (highest - lowest) * float(share**self.dynatemp_exponent)
