"""Causal attention of one sequence's new tokens over its cached keys and values.

Grouped queries: query head `kv * group + g` reads key/value head `kv`. New token r stands at `length + r` and sees the
keys 0..length + r, or the last of them when there is a window. Query rows are treated in blocks, so that scores never
need `[heads, tokens, keys]` at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Observer

from treadle_server.model.alibi import Alibi
from treadle_server.model.kv_cache import BLOCK_TOKENS
from treadle_server.model.ops import softcap_forward, softmax_forward
from treadle_server.model.ops_backward import softcap_backward

# Scores held at once, all heads together: 8 MB in float32, of the order of the last-level cache.
MAX_SCORES = 1 << 21
# The backward pass goes over its scores many times: 256 KB of them, which the second-level cache holds twice. Fewer
# rows than this make slow products, and more would work out more of the future, which is masked.
BACKWARD_SCORES = 1 << 16
MIN_BACKWARD_ROWS = 32
MANY_KEYS = 512


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer makes of the products of queries and keys: in this order scale, softcap, ALiBi's biases, mask.

    Attributes:
        scale: multiplies the products.
        window: how many of the last tokens a token sees, itself included; None for all.
        softcap: bounds the scaled scores.
        alibi: biases that fall with the distance.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: Alibi | None = None

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def attention_forward(
    q: Array, keys: Array, values: Array, length: int, scoring: Scoring, out: Array, observe: Observer | None = None
) -> None:
    """Fill out `[rows, kv_heads, group, head_dim]` from q of that shape.

    Keys and values are `[kv_heads, capacity, head_dim]`; those of the new rows are in there already, from `length` on.
    What a cache keeps in a smaller number type is widened, exactly.
    """
    rows, kv_heads, group, _ = q.shape
    total = length + rows
    block = rows if observe is not None else max(1, MAX_SCORES // (kv_heads * group * total))
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        seen = length + stop
        first = 0 if observe is not None else scoring.first_seen(length + start)
        own_keys, own_values = (kept[:, first:seen].astype(q.dtype, copy=False) for kept in (keys, values))
        _attend_block(q[start:stop], own_keys, own_values, first, scoring, out[start:stop], observe)


def _attend_block(
    q: Array, keys: Array, values: Array, first: int, scoring: Scoring, out: Array, observe: Observer | None
) -> None:
    """Attend from the last `rows` tokens of keys `[kv_heads, seen, head_dim]`, which start at position `first`."""
    rows, kv_heads, group, head_dim = q.shape
    scores = _bounded_scores(q, keys, scoring, observe)
    weights = _weights(scores, rows, first, scoring, observe)
    heads = np.matmul(weights, values)  # [kv_heads, group * rows, head_dim]
    out[...] = heads.reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)


def _bounded_scores(q: Array, keys: Array, scoring: Scoring, observe: Observer | None = None) -> Array:
    """Return the scores `[kv_heads, group * rows, seen]` up to the softcap, nothing masked yet."""
    scores = _scores(q, keys)  # [kv_heads, group * rows, seen]
    by_head = scores.reshape(-1, len(q), keys.shape[1])  # [heads, rows, seen]
    _show(observe, "scores", by_head)
    scores *= scoring.scale
    _show(observe, "scaled_scores", by_head)
    if scoring.softcap is not None:
        softcap_forward(scores, scoring.softcap, out=scores)
        _show(observe, "capped_scores", by_head)
    return scores


def _weights(scores: Array, rows: int, first: int, scoring: Scoring, observe: Observer | None = None) -> Array:
    """Turn scores `[kv_heads, group * rows, seen]` into weights in place: ALiBi's biases, mask, softmax."""
    seen = scores.shape[2]
    by_head = scores.reshape(-1, rows, seen)  # [heads, rows, seen]
    if scoring.alibi is not None:
        positions = np.arange(first, first + seen)
        by_head += scoring.alibi.biases(positions[-rows:], positions)
        _show(observe, "biased_scores", by_head)
    if rows > 1:
        places = np.arange(rows)
        future = places > places[:, None]
        np.copyto(by_head[:, :, -rows:], -np.inf, where=future)
    if scoring.window is not None:
        columns = np.arange(seen)
        np.copyto(by_head, -np.inf, where=columns <= columns[-rows:, None] - scoring.window)
    _show(observe, "masked_scores", by_head)
    softmax_forward(scores, out=scores)
    _show(observe, "weights", by_head)
    return scores


def _scores(q: Array, keys: Array) -> Array:
    """Return every query's product with every key, `[kv_heads, group * rows, seen]`."""
    if len(q) == 1 and keys.shape[1] > MANY_KEYS:
        # One matrix-vector product a head: OpenBLAS is four times slower at a product of a few rows with many columns.
        products: Array = np.matmul(keys[:, None], q[0, ..., None])  # [kv_heads, group, seen, 1]
        return products[..., 0]
    scores: Array = np.matmul(_stack(q), keys.transpose(0, 2, 1))
    return scores


def _show(observe: Observer | None, name: str, array: Array) -> None:
    if observe is not None:
        observe(name, array.copy())


def attention_backward(
    q: Array, keys: Array, values: Array, scoring: Scoring, out: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """Return dq, dkeys, dvalues of a whole sequence, given out and dout `[rows, kv_heads, group, head_dim]`.

    Keys and values are `[kv_heads, rows, head_dim]`. The weights are worked out again, a block of rows at a time, and
    a row's dot product with its own gradient is taken from its output (Dao et al. 2022).
    """
    rows, kv_heads, group, _ = q.shape
    dq, dkeys, dvalues = np.empty_like(q), np.zeros_like(keys), np.zeros_like(values)
    block = max(MIN_BACKWARD_ROWS, BACKWARD_SCORES // (kv_heads * group * rows))
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        seen = slice(scoring.first_seen(start), stop)
        dq[start:stop] = _attend_block_backward(
            q[start:stop],
            (keys[:, seen], values[:, seen]),
            seen.start,
            scoring,
            (out[start:stop], dout[start:stop]),
            (dkeys[:, seen], dvalues[:, seen]),
        )
    return dq, dkeys, dvalues


def _attend_block_backward(
    q: Array, cached: tuple[Array, Array], first: int, scoring: Scoring, outs: tuple[Array, Array],
    dcached: tuple[Array, Array],
) -> Array:  # fmt: skip
    """Return a block's dq and add to the gradients of the keys and values that it saw."""
    rows, kv_heads, group, head_dim = q.shape
    (keys, values), (dkeys, dvalues) = cached, dcached
    out, dout = (_stack(one) for one in outs)  # [kv_heads, group * rows, head_dim]
    scores = _bounded_scores(q, keys, scoring)  # [kv_heads, group * rows, seen]
    bounded = scores.copy() if scoring.softcap is not None else scores
    weights = _weights(scores, rows, first, scoring)
    dvalues += np.matmul(weights.transpose(0, 2, 1), dout)
    dscores: Array = np.matmul(dout, values.transpose(0, 2, 1))
    dscores -= np.einsum("kri,kri->kr", out, dout)[..., None]
    dscores *= weights
    if scoring.softcap is not None:
        dscores = softcap_backward(bounded, scoring.softcap, dscores)
    dscores *= scoring.scale
    dkeys += np.matmul(dscores.transpose(0, 2, 1), _stack(q))
    dq: Array = np.matmul(dscores, keys)
    return dq.reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)


def _stack(q: Array) -> Array:
    """Return `[kv_heads, group * rows, head_dim]` of `[rows, kv_heads, group, head_dim]`."""
    rows, kv_heads, group, head_dim = q.shape
    return q.transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, head_dim)


def reproducible_attention_forward(
    q: Array, keys: Array, values: Array, length: int, scoring: Scoring, out: Array
) -> None:
    """Like `attention_forward`, but a row's result depends on its own query and the keys before it alone, bit for bit.

    Keys are cut in blocks of BLOCK_TOKENS at absolute positions. Each query row makes one product of a fixed shape with
    each block; the blocks' sums are added in order. Blocks that a row does not see add exact zeros.
    """
    rows, kv_heads, group, head_dim = q.shape
    num_blocks = -(-(length + rows) // BLOCK_TOKENS)
    padded = num_blocks * BLOCK_TOKENS
    # Rows past the end are whatever the memory held: a NaN there would survive a weight of zero.
    keys[:, length + rows : padded] = 0
    values[:, length + rows : padded] = 0
    blocks = (kv_heads, num_blocks, BLOCK_TOKENS, head_dim)
    keys, values = (kept[:, :padded].astype(q.dtype, copy=False).reshape(blocks) for kept in (keys, values))
    keys = keys.transpose(0, 1, 3, 2)
    step = max(1, MAX_SCORES // (kv_heads * group * num_blocks * max(head_dim, BLOCK_TOKENS)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first = scoring.first_seen(length + start) // BLOCK_TOKENS
        seen = slice(first, -(-(length + stop) // BLOCK_TOKENS))
        positions = np.arange(length + start, length + stop)
        heads = _attend_key_blocks(q[start:stop], keys[:, seen], values[:, seen], positions, first, scoring)
        out[start:stop] = heads


def _attend_key_blocks(
    q: Array, keys: Array, values: Array, positions: NDArray[np.int64], first: int, scoring: Scoring
) -> Array:
    """Return `[rows, kv_heads, group, head_dim]`; a key block is `[head_dim, 64]`, a value block `[64, head_dim]`.

    `first` is the number of the first block.
    """
    scores = np.matmul(q[:, :, None], keys)  # [rows, kv_heads, blocks, group, 64]
    scores *= scoring.scale
    if scoring.softcap is not None:
        softcap_forward(scores, scoring.softcap, out=scores)
    blocks = keys.shape[1]
    key_positions = np.arange(first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS)
    if scoring.alibi is not None:
        scores += _block_biases(scoring.alibi, positions, key_positions, scores.shape)
    key_positions = key_positions.reshape(-1, 1, BLOCK_TOKENS)
    queries = positions[:, None, None, None, None]
    np.copyto(scores, -np.inf, where=key_positions > queries)
    if scoring.window is not None:
        np.copyto(scores, -np.inf, where=key_positions <= queries - scoring.window)
    scores -= np.maximum.reduce(scores, axis=(2, 4), keepdims=True)
    weights = np.exp(scores, out=scores)
    totals = np.add.reduce(weights, axis=4)  # [rows, kv_heads, blocks, group]
    parts = np.matmul(weights, values)  # [rows, kv_heads, blocks, group, head_dim]
    numerator: Array = parts[:, :, 0].copy()
    denominator: Array = totals[:, :, 0].copy()
    for block in range(1, blocks):
        numerator += parts[:, :, block]
        denominator += totals[:, :, block]
    numerator /= denominator[..., None]
    return numerator


def _block_biases(
    alibi: Alibi, queries: NDArray[np.int64], keys: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return ALiBi's biases as scores are laid out: `[rows, kv_heads, blocks, group, 64]`."""
    rows, kv_heads, blocks, group, _ = shape
    biases = alibi.biases(queries, keys)  # [heads, rows, keys]
    return biases.reshape(kv_heads, group, rows, blocks, BLOCK_TOKENS).transpose(2, 0, 3, 1, 4)
