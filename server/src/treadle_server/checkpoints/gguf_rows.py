"""Puts the rows of attention matrices into Hugging Face's order.

llama.cpp rotates neighbouring pairs of a head's dimensions where Hugging Face pairs the two halves, and it wants fused
queries, keys and values one after the other where some families mix them by head. Its converters reorder the rows; the
functions here say, for each row of the original, where it lies in the file: int64 [num_rows].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query heads and of key-value heads, and the size of a head."""

    num_query: int
    num_kv: int
    dim: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values in a fused matrix."""
        return self.num_query * self.dim, self.num_kv * self.dim, self.num_kv * self.dim


def query_halves(heads: Heads) -> np.ndarray:
    """Return the order of query rows whose pairs were neighbours."""
    return _halves(heads.num_query, heads.dim)


def key_halves(heads: Heads) -> np.ndarray:
    """Return the order of key rows whose pairs were neighbours."""
    return _halves(heads.num_kv, heads.dim)


def fused_groups(heads: Heads) -> np.ndarray:
    """Return the order of fused rows where each key-value head follows the queries that it serves."""
    queries, keys, values = np.split(np.arange(sum(heads.parts)), np.cumsum(heads.parts)[:-1])
    groups = [part.reshape(heads.num_kv, -1) for part in (queries, keys, values)]
    return np.concatenate(groups, axis=1).reshape(-1)


def _halves(num_heads: int, dim: int) -> np.ndarray:
    pairs = np.arange(num_heads * dim).reshape(num_heads, dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
