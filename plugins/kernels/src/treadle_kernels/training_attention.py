"""Causal attention of whole sequences and its backward pass, for rotary or plain scores with a window or without.

Everything is read from the rows of fused queries, keys and values and written to rows of that layout: nothing is
copied but keys and values turned, once for each head of theirs. A block of query rows of one head has its scores with
all keys that it sees at once, in memory that stays near; a row's weights are worked out again in the backward pass
(Dao et al. 2022).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from treadle_kernels.compiled import entry_point
from treadle_kernels.memory import floats_at
from treadle_kernels.tiles import exp_row, largest_of_row
from treadle_kernels.training_products import outer_rows, turn
from treadle_kernels.training_row_tiles import dot_row, scale_row, score_slopes_row

# Query rows of a block: their scores are made, and read again, before the next.
QUERY_ROWS = 24


class Shape(NamedTuple):
    """Sizes of an attention; of one layer. All but scale are int64.

    Attributes:
        heads: of queries; a key head has heads / kv_heads of them.
        window: the last tokens that a token sees, itself included.
        scale: float32, what scores are multiplied by.
    """

    heads: Any
    kv_heads: Any
    head_dim: Any
    window: Any
    scale: Any


def room_of(shape: Shape, longest: int) -> int:
    """Return the floats that a thread needs for sequences of up to `longest` tokens."""
    return 2 * longest * (int(shape.head_dim) + QUERY_ROWS)


@njit(nogil=True)
def _weigh(shape, queries, row_bytes, turned_keys, first, start, stop, scores):
    """Fill scores `[stop - start, stop - first]` with the weights of rows start to stop; 0 for keys not seen."""
    seen, length_bytes = stop - first, turned_keys[1]
    keys = (turned_keys[0] + 4 * first, length_bytes)
    place = (queries + start * row_bytes, row_bytes, np.int64(4))
    outer_rows(stop - start, False, place, keys, (scores, 4 * seen), shape.head_dim, seen)
    for row in range(start, stop):
        at, own = scores + 4 * (row - start) * seen, max(first, row - shape.window + 1) - first
        count = row + 1 - first - own
        total = exp_row(at + 4 * own, count, shape.scale, largest_of_row(at + 4 * own, count))
        scale_row(at + 4 * own, count, np.float32(1.0) / total, np.float32(0.0))
        floats_at(at, own)[:] = np.float32(0.0)
        floats_at(at + 4 * (own + count), seen - own - count)[:] = np.float32(0.0)


@entry_point
def attention(shape, qkv, heads, starts, room):
    """Fill heads `[tokens, heads * head_dim]` given qkv `[tokens, (heads + 2 kv_heads) * head_dim]`, already turned.

    starts `[sequences + 1] int64`; room `[room_of(...)] float32`.
    """
    head_bytes, group = 4 * shape.head_dim, shape.heads // shape.kv_heads
    row_bytes, out_bytes, turned = qkv.strides[0], heads.strides[0], np.int64(room.ctypes.data)
    for sequence in range(len(starts) - 1):
        base, length = np.int64(qkv[starts[sequence] :].ctypes.data), starts[sequence + 1] - starts[sequence]
        out, scores = np.int64(heads[starts[sequence] :].ctypes.data), turned + 4 * length * shape.head_dim
        for kv_head in range(shape.kv_heads):
            keys = base + (shape.heads + kv_head) * head_bytes
            values = keys + shape.kv_heads * head_bytes
            turn(keys, row_bytes, length, shape.head_dim, turned, 4 * length)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for start in range(0, length, QUERY_ROWS):
                    stop, first = min(start + QUERY_ROWS, length), max(0, start - shape.window + 1)
                    queries = base + head * head_bytes
                    _weigh(shape, queries, row_bytes, (turned, 4 * length), first, start, stop, scores)
                    weights = (scores, 4 * (stop - first), np.int64(4))
                    place = (out + start * out_bytes + head * head_bytes, out_bytes)
                    found = (values + first * row_bytes, row_bytes)
                    outer_rows(stop - start, False, weights, found, place, stop - first, shape.head_dim)


@njit(nogil=True)
def _block_backward(shape, rows, at, dat, outs, turned, scores):
    """Fill the gradients of query rows of one head and add to those of the keys and values that they see.

    rows is (first key, first row, row behind the last). at and dat are (queries, keys, values, row stride) and their
    gradients', outs is (output, its gradient, row stride), turned is (keys, values, stride).
    """
    (first, start, stop), (queries, keys, _, row_bytes), (out, dout, out_bytes) = rows, at, outs
    (dqueries, dkeys, dvalues, _), (turned_keys, turned_values, length_bytes) = dat, turned
    count, seen, dim = stop - start, stop - first, shape.head_dim
    slopes, score_bytes = scores + 4 * count * seen, 4 * seen
    _weigh(shape, queries, row_bytes, (turned_keys, length_bytes), first, start, stop, scores)
    dplace = (dout + start * out_bytes, out_bytes, np.int64(4))
    outer_rows(count, False, dplace, (turned_values + 4 * first, length_bytes), (slopes, score_bytes), dim, seen)
    for row in range(count):
        place, offset = (start + row) * out_bytes, row * score_bytes
        score_slopes_row(scores + offset, slopes + offset, dot_row(out + place, dout + place, dim), shape.scale, seen)
    by_key, drows = (scores, np.int64(4), score_bytes), (dout + start * out_bytes, out_bytes)
    outer_rows(seen, True, by_key, drows, (dvalues + first * row_bytes, row_bytes), count, dim)
    by_key, query_rows = (slopes, np.int64(4), score_bytes), (queries + start * row_bytes, row_bytes)
    outer_rows(seen, True, by_key, query_rows, (dkeys + first * row_bytes, row_bytes), count, dim)
    by_row, key_rows = (slopes, score_bytes, np.int64(4)), (keys + first * row_bytes, row_bytes)
    outer_rows(count, False, by_row, key_rows, (dqueries + start * row_bytes, row_bytes), seen, dim)


@njit(nogil=True)
def _sequence_backward(shape, base, dbase, row_bytes, outs, length, room):
    """Fill the gradients of one sequence's rows of queries, keys and values."""
    head_bytes, group = 4 * shape.head_dim, shape.heads // shape.kv_heads
    turned, length_bytes = (room, room + 4 * length * shape.head_dim), 4 * length
    scores = room + 8 * length * shape.head_dim
    for kv_head in range(shape.kv_heads):
        key = (shape.heads + kv_head) * head_bytes
        value = key + shape.kv_heads * head_bytes
        for part, place in ((key, turned[0]), (value, turned[1])):
            turn(base + part, row_bytes, length, shape.head_dim, place, length_bytes)
            for row in range(length):
                floats_at(dbase + part + row * row_bytes, shape.head_dim)[:] = np.float32(0.0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            at = (base + head * head_bytes, base + key, base + value, row_bytes)
            dat = (dbase + head * head_bytes, dbase + key, dbase + value, row_bytes)
            own = (outs[0] + head * head_bytes, outs[1] + head * head_bytes, outs[2])
            for start in range(0, length, QUERY_ROWS):
                rows = (max(0, start - shape.window + 1), start, min(start + QUERY_ROWS, length))
                _block_backward(shape, rows, at, dat, own, (turned[0], turned[1], length_bytes), scores)


@entry_point
def attention_backward(shape, qkv, heads, dheads, starts, dqkv, room):
    """Fill dqkv, of qkv's shape and strides, given dheads, of heads' shape and strides; see `attention`."""
    for sequence in range(len(starts) - 1):
        start, length = starts[sequence], starts[sequence + 1] - starts[sequence]
        base, dbase = np.int64(qkv[start:].ctypes.data), np.int64(dqkv[start:].ctypes.data)
        outs = (np.int64(heads[start:].ctypes.data), np.int64(dheads[start:].ctypes.data), heads.strides[0])
        _sequence_backward(shape, base, dbase, qkv.strides[0], outs, length, np.int64(room.ctypes.data))
