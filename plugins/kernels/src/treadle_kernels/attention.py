"""What some query rows see: scores, softmax and the mixing of values, for one head of keys and values."""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import register_jitable

from treadle_kernels.memory import floats_at
from treadle_kernels.tiles import exp_row, largest_of_row, mix_strip, transpose_square

# Query rows that attend in one chunk, at most, and keys that they see at once.
QUERY_ROWS, KEY_BLOCK = 16, 64


@njit(nogil=True)
def _mix(weights, weight_stride, num_rows, values, value_stride, count, dim, out, out_stride, fetched):
    """Fill `[num_rows, dim]` at out with weights `[num_rows, count]` @ values `[count, dim]`; see `mix_strip`."""
    while num_rows >= 4:
        mix_strip(4, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
        num_rows, weights, out = num_rows - 4, weights + 4 * weight_stride, out + 4 * out_stride
    if num_rows == 3:
        mix_strip(3, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
    elif num_rows == 2:
        mix_strip(2, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
    elif num_rows == 1:
        mix_strip(1, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)


@register_jitable
def turned_floats(head_dim):
    """Return the room for a block of keys, turned: rows of KEY_BLOCK float32."""
    return (head_dim + 15) // 16 * 16 * KEY_BLOCK


@njit(nogil=True)
def _transpose(keys, count, head_dim, turned, values):
    """Write a block of keys `[count, head_dim]` as `[head_dim, KEY_BLOCK]`; fetch their values meanwhile."""
    for key in range(0, count, 16):
        for column in range(0, head_dim, 16):
            source, target = keys + 4 * (key * head_dim + column), turned + 4 * (column * KEY_BLOCK + key)
            rows, width = min(16, count - key), min(16, head_dim - column)
            transpose_square(source, 4 * head_dim, rows, width, target, 4 * KEY_BLOCK, values - keys)


@njit(nogil=True)
def attend_rows(model, positions, window, scale, keys, values, next_keys, queries, made, turned, scores):
    """Fill made with what query rows of one sequence, at ascending positions, see in one key head's keys and values.

    queries and made are `[rows, group, head_dim]`; turned is room for a block of keys, scores for those of all, `[rows,
    group, seen]`. A score is summed over head_dim in ascending order. Of many sequences all of that comes from memory:
    values are fetched while keys are turned, and the next chunk's keys while values are mixed.
    """
    num_rows, head_dim, group = len(positions), model.head_dim, model.heads // model.kv_heads
    first = max(0, positions[0] - window + 1)
    seen = positions[num_rows - 1] + 1 - first
    row_bytes, totals = 4 * head_dim, np.empty(group, np.float32)
    for start in range(0, seen, KEY_BLOCK):
        count, place = min(KEY_BLOCK, seen - start), (first + start) * row_bytes
        _transpose(keys + place, count, head_dim, turned, values + place)
        scored = scores + 4 * start, 4 * seen
        _mix(queries, row_bytes, num_rows * group, turned, 4 * KEY_BLOCK, head_dim, count, *scored, turned)
    for row in range(num_rows):
        own = max(0, positions[row] - window + 1)
        count, at = positions[row] + 1 - own, scores + 4 * (row * group * seen + own - first)
        out = made + row * group * row_bytes
        # Sums of exponentials are divided by at the end, in a row of the head's size instead of one of all keys.
        for member in range(group):
            own_scores = at + 4 * member * seen
            totals[member] = exp_row(own_scores, count, scale, largest_of_row(own_scores, count))
        mixed_rows, fetched = values + own * row_bytes, next_keys if row == num_rows - 1 else values
        _mix(at, 4 * seen, group, mixed_rows, row_bytes, count, head_dim, out, row_bytes, fetched + own * row_bytes)
        for member in range(group):
            mixed = floats_at(out + member * row_bytes, head_dim)
            for column in range(head_dim):
                mixed[column] /= totals[member]
