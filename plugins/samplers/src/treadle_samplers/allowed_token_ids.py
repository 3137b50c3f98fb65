"""A list of the only tokens that may come."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, ModelInfo, PrivateAttr, SamplingContext, Stage, keep
from treadle_plugin_api.logits import Ids

from treadle_samplers.token_ids import TokenId, check_ids, require_token

TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


class AllowedTokenIds(Stage):
    """Mask every token that is not on a list.

    Formula: l_i = -inf unless i is one of `allowed_token_ids` (as in vLLM).

    Edges: an empty list and ids outside the vocabulary are refused at admission; repeats do no harm. Where other masks
    leave none of the listed tokens, the request fails: nothing outside the list is ever chosen. End-of-text ids must be
    listed to be possible.
    """

    name = "allowed_token_ids"
    kind = "mask"
    api_version = 1

    allowed_token_ids: Annotated[TokenIds | None, Knob(off=(None,))] = Field(
        default=None, description="ids of the tokens that may be chosen; all when unset"
    )
    _ids: Ids = PrivateAttr()

    def model_post_init(self, _: Any, /) -> None:
        """Keep the ids as an array, ascending."""
        self._ids = np.array(sorted(set(self.allowed_token_ids or ())), dtype=np.int64)

    def check(self, model_info: ModelInfo) -> None:
        """Refuse ids outside the vocabulary."""
        check_ids(self.name, self.allowed_token_ids or (), model_info.vocab_size)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The listed tokens, the rest masked."""
        if self.allowed_token_ids is None:
            return logits
        return require_token(keep(logits, self._ids, context.empty()), "every allowed token is masked")
