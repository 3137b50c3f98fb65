"""ALiBi (Press et al. 2022): every head takes from a score what grows with the distance of key and query."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Alibi:
    """Slopes `[heads] float64`; `scale` multiplies the biases, which `rounded` rounds to bfloat16 first."""

    slopes: Floats
    scale: float = 1.0
    rounded: bool = False

    @classmethod
    def of(cls, num_heads: int, *, scale: float = 1.0, rounded: bool = False) -> Alibi:
        """Make the slopes of that many heads."""
        slopes = alibi_slopes(num_heads)
        return cls(round_to_bfloat16(slopes) if rounded else slopes, scale, rounded)

    def biases(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> Floats:
        """Return what is added to the scores, `[heads, rows, keys]`, of queries `[rows]` and keys at these positions.

        It is 0 where a query meets itself and falls with the distance: subtracting a row's own bias changes no weight.
        """
        biases: Floats = self._at(keys)[:, None, :] - self._at(queries)[:, :, None]
        return biases

    def _at(self, positions: NDArray[np.int64]) -> Floats:
        """Return the bias of each head and absolute position, `[heads, positions]`."""
        biases = self.slopes[:, None] * positions
        if self.rounded:
            biases = round_to_bfloat16(biases)
        return biases * self.scale


def alibi_slopes(num_heads: int) -> Floats:
    """Return `[heads]`: 2^(-8 h / heads) for a power of two, which other numbers fill up from twice as many heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (num_heads - power), 2) / power)
    return np.concatenate([slopes, between])


def round_to_bfloat16(x: Floats) -> Floats:
    """Return the nearest bfloat16 values, ties to even, as float64."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
