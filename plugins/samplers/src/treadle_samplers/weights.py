"""Softmax weights of long rows, block by block: temporaries the size of a vocabulary cost more than the arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import Logits

# 64 KiB of float64, which the allocator serves without fresh pages.
BLOCK = 8192


def weights(values: Logits, largest: np.float32) -> NDArray[np.float64]:
    """exp(l - largest) of `values` [n] float32 as float64; masked ones give 0."""
    shifted = values.astype(np.float64)
    shifted -= largest
    return np.exp(shifted, out=shifted)


def block_sums(values: Logits, largest: np.float32) -> NDArray[np.float64]:
    """Sum of the weights of each `BLOCK` of `values` [n] float32, in order: [blocks] float64."""
    starts = range(0, len(values), BLOCK)
    return np.array([weights(values[start : start + BLOCK], largest).sum() for start in starts])
