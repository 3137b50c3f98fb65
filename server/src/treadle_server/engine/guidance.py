"""Classifier-free guidance: the next token is drawn from what a prompt says beyond a negative prompt.

Source: Sanchez et al., Stay on topic with Classifier-Free Guidance, 2306.17806.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_server.engine.lane import Ids


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a request is guided.

    Attributes:
        scale: 1 leaves the model as it is; more follows the prompt more closely, less follows the negative one.
        negative_ids: int64 [negative prompt], at least one.
    """

    scale: float
    negative_ids: Ids


def guided_logits(
    logits: npt.NDArray[np.floating], negative: npt.NDArray[np.floating], scale: float
) -> npt.NDArray[np.float32]:
    """Return log p' = log n + scale * (log p - log n) of two rows of logits [vocab], float32.

    p is the model's distribution after the prompt and n the one after the negative prompt, each with the output so far.
    A token that either of them masks stays masked.
    """
    given, unwanted = _log_softmax(logits), _log_softmax(negative)
    with np.errstate(invalid="ignore"):
        mixed = unwanted + scale * (given - unwanted)
    mixed[np.isneginf(given) | np.isneginf(unwanted)] = -np.inf
    return mixed.astype(np.float32)


def _log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
