"""What some query rows see: scores, softmax and the mixing of values, for one head of keys and values.

Scores are products like those of matrices, whose rows are the keys: their sums have the same order.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import register_jitable

from treadle_kernels.compiled import kernel
from treadle_kernels.memory import floats_at
from treadle_kernels.products import block_function, caller_of, packed_floats, row_packer
from treadle_kernels.tiles import KEPT, exp_row, largest_of_row, mix_strip

# Query rows that attend in one chunk, at most, and keys that they see at once.
QUERY_ROWS, KEY_BLOCK = 16, 64
ATTEND_ARGUMENTS = 12
# How keys that are kept so meet queries, of `tiles.FORMS`.
PRODUCTS = MappingProxyType({"float32": "float32", "bfloat16": "bfloat16_rounded"})


@register_jitable
def attend_floats(num_rows: int, group: int, head_dim: int, seen: int) -> int:
    """Return the room that `attend` wants, in float32."""
    size: int = num_rows * group * (head_dim + packed_floats(head_dim) + seen)
    return size


def make_attend(kept: str) -> Any:
    """Make `attend` for keys and values kept in one of `tiles.KEPT`, as a C function.

    `attend(position, num_rows, group, head_dim, window, scale, queries, query_stride, keys, values, next_keys, room)`
    fills the beginning of room, `[rows, group, head_dim]`, with what query rows of one sequence, the first of them at
    `position`, see in one key head's keys and values. queries: rows of `[group, head_dim]` float32, query_stride bytes
    apart; scale: the address of what multiplies scores; room: `attend_floats` for the last row.

    A row's scores with all keys that it sees are there at once. Of many sequences all that is read comes from memory:
    values are fetched while scores are made, and the next chunk's keys while values are mixed.
    """
    weigh, block, pack = _weigher(kept), block_function(PRODUCTS[kept]), register_jitable(row_packer(PRODUCTS[kept]))
    item_bytes = KEPT[kept][1]

    @kernel(types.void(*[types.int64] * ATTEND_ARGUMENTS))
    def attend(
        position, num_rows, group, head_dim, window, scale, queries, query_stride, keys, values, next_keys, room
    ):
        first, row_bytes, made_bytes = max(0, position - window + 1), item_bytes * head_dim, 4 * head_dim
        seen = position + num_rows - first
        packed, packed_bytes = room + num_rows * group * made_bytes, 0
        for row in range(num_rows):
            target = packed + row * group * packed_bytes
            packed_bytes = pack(queries + row * query_stride, made_bytes, group, head_dim, target)
        scores = packed + 4 * num_rows * group * packed_floats(head_dim)
        for start in range(0, seen, KEY_BLOCK):
            count, place = min(KEY_BLOCK, seen - start), (first + start) * row_bytes
            given = packed, packed_bytes, num_rows * group, head_dim
            block(keys + place, row_bytes, count, *given, scores + 4 * start, 4 * seen, values + place)
        for row in range(num_rows):
            own = max(0, position + row - window + 1)
            count, place = position + row + 1 - own, own * row_bytes
            own_scores = scores + 4 * (row * group * seen + own - first), 4 * seen, group, count, scale
            fetched = next_keys if row == num_rows - 1 else values
            out = room + row * group * made_bytes
            # What the queries were packed in is free now.
            weigh(*own_scores, values + place, row_bytes, head_dim, out, fetched + place, packed)

    return attend


def _weigher(kept: str) -> Any:
    """Make what becomes of a row's scores: their softmax, and the values that it mixes."""
    mix = _mixer(kept)

    @register_jitable
    def weigh(scores, score_bytes, group, count, scale, values, row_bytes, head_dim, out, fetched, room):
        # Sums of exponentials are divided by at the end, in a row of the head's size instead of one of all keys.
        totals, factor = floats_at(room, group), floats_at(scale, 1)[0]
        for member in range(group):
            at = scores + member * score_bytes
            totals[member] = exp_row(at, count, factor, largest_of_row(at, count))
        mix(scores, score_bytes, group, values, row_bytes, count, head_dim, out, 4 * head_dim, fetched)
        for member in range(group):
            mixed = floats_at(out + 4 * member * head_dim, head_dim)
            for column in range(head_dim):
                mixed[column] /= totals[member]

    return weigh


def _mixer(kept: str) -> Any:
    """Make `mix_strip` for any number of rows."""

    @register_jitable
    def mix(weights, weight_stride, num_rows, values, value_stride, count, dim, out, out_stride, fetched):
        while num_rows > 0:
            if num_rows >= 4:
                mix_strip(4, kept, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
            elif num_rows == 3:
                mix_strip(3, kept, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
            elif num_rows == 2:
                mix_strip(2, kept, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
            else:
                mix_strip(1, kept, weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched)
            num_rows, weights, out = num_rows - 4, weights + 4 * weight_stride, out + 4 * out_stride

    return mix


attend_by = caller_of(types.void, ir.VoidType(), ATTEND_ARGUMENTS)
