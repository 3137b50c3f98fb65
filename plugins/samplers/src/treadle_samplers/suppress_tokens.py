"""A list of tokens that never come."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, ModelInfo, PrivateAttr, SamplingContext, Stage
from treadle_plugin_api.logits import Ids

from treadle_samplers.token_ids import TokenId, check_ids, require_token, without


class SuppressTokens(Stage):
    """Mask every token on a list.

    Formula: l_i = -inf if i is one of `suppress_tokens` (as in transformers).

    Edges: an empty list is off. Ids outside the vocabulary, and a list of all of it, are refused at admission. Where
    other masks leave nothing but listed tokens, the request fails: none of them is ever chosen.
    """

    name = "suppress_tokens"
    kind = "mask"
    api_version = 1

    suppress_tokens: Annotated[tuple[TokenId, ...], Knob(off=((),))] = Field(
        default=(), description="ids of tokens that may never be chosen"
    )
    _ids: Ids = PrivateAttr()

    def model_post_init(self, _: Any, /) -> None:
        """Keep the ids as an array."""
        self._ids = np.array(sorted(set(self.suppress_tokens)), dtype=np.int64)

    def check(self, model_info: ModelInfo) -> None:
        """Refuse ids outside the vocabulary, and all of it."""
        check_ids(self.name, self.suppress_tokens, model_info.vocab_size)
        if len(self._ids) == model_info.vocab_size:
            raise ValueError(f"suppress_tokens must leave a token; received all {len(self._ids)} of the vocabulary")

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without the listed tokens."""
        return require_token(without(logits, self._ids, context), "every token that is left is suppressed")
