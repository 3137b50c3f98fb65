"""Temperature."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, keep

# Below this a division overflows float32 for ordinary logits, while the draw has long been the argmax.
GREEDY_BELOW = 1e-5


class Temperature(Stage):
    """Flatten (T > 1) or sharpen (T < 1) the distribution.

    Formula: (l - max l) / T; the shift changes no probability and keeps the division from overflowing (Ackley, Hinton,
    Sejnowski: A Learning Algorithm for Boltzmann Machines, 1985).

    Edges: 0, and anything under 1e-5, keeps the largest logit alone (lowest id among equals); a chain that holds such a
    stage becomes masks, penalties, greedy. A logit so far below the largest that the quotient overflows gets
    probability 0.
    """

    name = "temperature"
    kind = "transform"
    api_version = 1
    argmax_invariant = True

    temperature: Annotated[float, Knob(off=(1.0,))] = Field(
        default=1.0, ge=0, description="divisor of the logits; 1 changes nothing, 0 is greedy"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The scaled logits."""
        out = context.empty()
        if self.temperature < GREEDY_BELOW:
            return keep(logits, np.array([logits.argmax()]), out)
        with np.errstate(over="ignore"):
            np.subtract(logits, logits.max(), out=out)
            # Past float32's range the divisor would become inf, and 0 * inf is no number.
            np.divide(out, np.float32(min(self.temperature, 1e38)), out=out)
        return out
