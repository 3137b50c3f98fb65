"""Locally typical sampling."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Stage, keep

from treadle_samplers.nucleus import nucleus
from treadle_samplers.weights import compact, moments, weights


class TypicalP(Stage):
    """Keep the smallest set of most typical tokens whose probability reaches p.

    Formula: typical is what carries as much information as the distribution does on average: in the order
    (|-ln p_i - H| ascending, id ascending), H the entropy in nats, the shortest prefix with mass >= p - 1e-6 (Meister,
    Pimentel, Wiher, Cotterell: Locally Typical Sampling, 2022).

    Edges: the most likely token can be dropped, if it is surer than typical. The token that crosses p is kept, so there
    is always one. p = 1 keeps all. p = 0 is refused. Mass and entropy are of the tokens not masked.
    """

    name = "typical_p"
    kind = "filter"
    api_version = 1

    typical_p: Annotated[float, Knob(off=(1.0,))] = Field(
        default=0.95, gt=0, le=1, description="probability mass of typical tokens to keep; 1 keeps all"
    )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The typical tokens, the rest masked."""
        if self.typical_p == 1.0:
            return logits
        values, ids = compact(logits)
        sums, largest = moments(values), values.max()
        closeness = context.empty()[: len(values)]  # -|ln p + H|; masked tokens get -inf
        with np.errstate(over="ignore"):
            np.subtract(values, largest, out=closeness)
        closeness += np.float32(sums.entropy - sums.log_total)
        np.abs(closeness, out=closeness)
        np.negative(closeness, out=closeness)
        total = np.exp(sums.log_total)
        kept = nucleus(closeness, lambda places: weights(values[places], largest) / total, self.typical_p)
        return keep(logits, kept if ids is None else ids[kept], context.empty())
