"""Token ids as parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import numpy as np
from treadle_plugin_api import Field, Logits, SamplingContext
from treadle_plugin_api.logits import Ids

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError, naming `field` and the place, for the first id that the vocabulary does not have."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            place = f".{token_id}" if field == "logit_bias" else f"[{index}]"
            raise ValueError(f"{field}{place} must be a token id from 0 to {vocab_size - 1}; received {token_id}")


def without(logits: Logits, banned: Ids, context: SamplingContext) -> Logits:
    """`logits` [vocab] float32 with the `banned` ids masked."""
    out = context.empty()
    np.copyto(out, logits)
    out[banned] = -np.inf
    return out


def require_token(logits: Logits, why: str) -> Logits:
    """`logits` [vocab] float32, if a token is left in it: a ban that cannot be kept is an error, never a guess."""
    if not logits.max() > -np.inf:
        raise ValueError(f"{why}: no token is left to choose")
    return logits
