"""The four primitives every stage shares, so that ties, slack and masked tokens mean the same in all of them.

Order is always (logit descending, id ascending): of equal logits the lowest id comes first. A masked one is -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

# Given in every comparison of a probability or a mass, so that decimal boundaries hold: .5 + .3 sums to just under .8.
MASS_SLACK = 1e-6

# Rows shorter than this are partitioned whole; a bound found from block maxima only pays on long ones.
_SHORT_ROW = 8192


def finite(logits: Logits) -> Ids:
    """Ids of the tokens of `logits` [vocab] float32 that are not masked, ascending: [kept] int64."""
    return np.flatnonzero(logits > -np.inf)


def softmax64(logits: Logits) -> NDArray[np.float64]:
    """Probabilities of `logits` [n] float32 as float64, summing to 1; masked tokens get 0. One must be finite."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def keep(logits: Logits, ids: Ids, out: Logits) -> Logits:
    """`out` [vocab], from `context.empty()`, filled with -inf but for `ids`, which keep their value in `logits`."""
    out.fill(-np.inf)
    out[ids] = logits[ids]
    return out


def top_ids(logits: Logits, k: int, *, ordered: bool = True) -> Ids:
    """Ids of the k largest of `logits` [vocab] float32, largest first, lowest id first among equals: [at most k] int64.

    Masked tokens are never among them, so fewer than k come back when fewer are left. With `ordered=False` the same ids
    come in ascending order, without the sort. The vocabulary itself is never sorted.
    """
    ids = _candidates(logits, k)
    values = logits[ids]
    if len(ids) > k:
        ids, values = _exactly(ids, values, k)
    if ordered:
        ids = ids[np.argsort(-values, kind="stable")]
    return ids


def _candidates(logits: Logits, k: int) -> Ids:
    """Ids, ascending, of every unmasked logit that can be among the k largest, ties included."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    bound = _lower_bound(logits, k)
    return np.flatnonzero(logits >= bound) if bound > -np.inf else finite(logits)


def _lower_bound(logits: Logits, k: int) -> np.float32:
    """A value that at least k logits reach, or -inf.

    A long row is folded into columns: the k-th largest of the column maxima is reached in k different columns, and
    finding it reads the row once instead of partitioning it.
    """
    num_columns = max(1024, 8 * k)
    num_rows = len(logits) // num_columns
    if len(logits) < _SHORT_ROW or num_rows < 2:
        return np.partition(logits, -k)[-k] if k < len(logits) else np.float32(-np.inf)
    maxima = logits[: num_rows * num_columns].reshape(num_rows, num_columns).max(axis=0)
    bound: np.float32 = np.partition(maxima, -k)[-k]
    return bound


def _exactly(ids: Ids, values: Logits, k: int) -> tuple[Ids, Logits]:
    """The k largest of ascending `ids`, still ascending, of the tied ones the lowest ids."""
    threshold = np.partition(values, -k)[-k]
    chosen = values > threshold
    tied = np.flatnonzero(values == threshold)
    chosen[tied[: k - int(np.count_nonzero(chosen))]] = True
    return ids[chosen], values[chosen]
