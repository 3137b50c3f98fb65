"""The products on tiles (AMX) as functions of the form that `products.Kernels` describes, for it to compile."""

from __future__ import annotations

from typing import Any

from treadle_kernels.amx_tiles import (
    STEP,
    STRIP_TILES,
    TERMS,
    TILE_BYTES,
    TILE_ROWS,
    begin_tiles,
    end_tiles,
    pack_group,
    tile_strip,
)
from treadle_kernels.tiles import LINE

STRIP_ROWS = STRIP_TILES * TILE_ROWS
# Rows of x are packed in groups of 16, which the tiles take at once; so much of each group is a row's share, for 32
# numbers and beside them. The latter lets a group begin where a line of memory does, wherever its room begins.
ROW_BYTES, BESIDE_BYTES = max(TERMS.values()) * TILE_BYTES // TILE_ROWS, LINE // TILE_ROWS


def tile_functions(form: str) -> tuple[Any, Any]:
    """Make `pack` and `multiply` for matrices of a format of `amx_tiles.TERMS`, not compiled yet."""
    step_bytes = TERMS[form] * TILE_BYTES

    def pack(x, x_stride, num_x, k, out):
        size, out = (k + STEP - 1) // STEP * step_bytes, (out + LINE - 1) & -LINE
        for start in range(0, num_x, TILE_ROWS):
            pack_group(form, x + start * x_stride, x_stride, min(TILE_ROWS, num_x - start), k, out)
            out += size
        return size // TILE_ROWS

    def multiply(weight, stride, row, count, x, x_stride, num_x, k, out, out_stride):
        first, x = weight + row * stride, (x + LINE - 1) & -LINE
        passes = (num_x + TILE_ROWS - 1) // TILE_ROWS
        # A strip reads many rows at once, so what is fetched meanwhile is the one behind it. Of several passes each
        # fetches its share of what lies behind these rows, as they all find the weights in the cache but the first.
        fetched = first + (min(count, STRIP_ROWS) if passes == 1 else count) * stride
        lines = TILE_BYTES // LINE
        pace, share = (lines + passes - 1) // passes * LINE, count * stride // passes
        begin_tiles()
        for start in range(0, num_x, TILE_ROWS):
            matrix = (first, stride, count, fetched, pace)
            packed, target = x + start * x_stride, out + start * out_stride
            tile_strip(form, matrix, (packed, min(TILE_ROWS, num_x - start), k, target, out_stride))
            fetched += share
        end_tiles()

    return pack, multiply
