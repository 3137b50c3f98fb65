"""Biases of single tokens."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import Field, Knob, Logits, ModelInfo, PrivateAttr, SamplingContext, Stage
from treadle_plugin_api.logits import Ids

from treadle_samplers.token_ids import TokenId, check_ids

Bias = Annotated[float, Field(ge=-100, le=100)]


class LogitBias(Stage):
    """Add a number to the logits of single tokens.

    Formula: l_i += b_i (OpenAI's API; vLLM).

    Edges: b is from -100 to 100. -100 nearly bans a token; `suppress_tokens` bans it. A masked token stays masked. The
    bias acts on the model's own logits, before the penalties and the temperature. An empty mapping is off. Ids outside
    the vocabulary are refused at admission.
    """

    name = "logit_bias"
    kind = "penalty"
    api_version = 1

    logit_bias: Annotated[dict[TokenId, Bias], Knob(off=({},))] = Field(
        default={}, description="number to add, by token id"
    )
    _ids: Ids = PrivateAttr()
    _biases: NDArray[np.float32] = PrivateAttr()

    def model_post_init(self, _: Any, /) -> None:
        """Keep ids and numbers as arrays."""
        self._ids = np.array(list(self.logit_bias), dtype=np.int64)
        self._biases = np.array(list(self.logit_bias.values()), dtype=np.float32)

    def check(self, model_info: ModelInfo) -> None:
        """Refuse ids outside the vocabulary."""
        check_ids(self.name, self.logit_bias, model_info.vocab_size)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The biased logits."""
        out = context.empty()
        np.copyto(out, logits)
        out[self._ids] += self._biases
        return out
