"""Log-probabilities and ranks from logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from treadle_plugin_api import top_ids

from treadle_server.engine.events import TokenLogprob


def token_logprob(logits: npt.NDArray[np.floating], token_id: int, num_top: int = 0) -> TokenLogprob:
    """Return the log-probability and rank of a token under logits [vocab], summed in float64.

    logprob(t) = logits[t] - max - log(sum(exp(logits - max))). Masked tokens (-inf) have no log-probability and are
    not listed.
    """
    largest = float(logits.max())
    log_total = largest + float(np.log(np.exp(np.subtract(logits, largest, dtype=np.float64)).sum()))
    chosen = float(logits[token_id])
    top = top_ids(logits, num_top) if num_top else ()
    return TokenLogprob(
        token_id=token_id,
        logprob=chosen - log_total if np.isfinite(chosen) else None,
        rank=1 + int(np.count_nonzero(logits > logits[token_id])),
        top=tuple((int(i), float(logits[i]) - log_total) for i in top if np.isfinite(logits[i])),
    )


def prompt_logprobs(
    logits: npt.NDArray[np.floating], next_ids: npt.NDArray[np.int64], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Return for each row of logits [rows, vocab] the log-probability of the token that follows it."""
    return tuple(token_logprob(row, int(i), num_top) for row, i in zip(logits, next_ids, strict=True))
