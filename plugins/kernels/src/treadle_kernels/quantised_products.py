"""The products of quantised matrices as C functions of the form that `products.Kernels` describes."""

from __future__ import annotations

from typing import Any

from numba import types

from treadle_kernels.compiled import kernel
from treadle_kernels.machine import Machine
from treadle_kernels.products import MULTIPLY_ARGUMENTS, PACK_ARGUMENTS
from treadle_kernels.quantised_tiles import OFFSETS, PACKED_BYTES, pack_row, panel_strip

# Rows of x in a tile: their sums of a group and over all groups are two vectors each.
TILE_ROWS = 8 if Machine.of_host().vnni else 2
HALF_ROWS = min(TILE_ROWS, 4)


def make_quantised_kernels(bits: int) -> tuple[Any, Any]:
    """Make `pack` and `multiply` for matrices in panels of numbers of 8 or 4 bits; see `products.Kernels`."""
    offset = OFFSETS[bits]

    @kernel(types.int64(*[types.int64] * PACK_ARGUMENTS))
    def pack(x, x_stride, num_x, k, out):
        for row in range(num_x):
            pack_row(x + row * x_stride, k, offset, out + row * PACKED_BYTES, num_x * PACKED_BYTES)
        return num_x * PACKED_BYTES

    @kernel(types.void(*[types.int64] * MULTIPLY_ARGUMENTS))
    def multiply(panels, panel_bytes, row, count, x, x_stride, num_x, k, out, out_stride):
        matrix = (panels, panel_bytes, row, count)
        while num_x >= TILE_ROWS:
            panel_strip(TILE_ROWS, bits, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - TILE_ROWS, x + TILE_ROWS * PACKED_BYTES, out + TILE_ROWS * out_stride
        while num_x >= HALF_ROWS:
            panel_strip(HALF_ROWS, bits, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - HALF_ROWS, x + HALF_ROWS * PACKED_BYTES, out + HALF_ROWS * out_stride
        while num_x >= 2:
            panel_strip(2, bits, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - 2, x + 2 * PACKED_BYTES, out + 2 * out_stride
        if num_x == 1:
            panel_strip(1, bits, matrix, (x, x_stride, k, out, out_stride))

    return pack, multiply
