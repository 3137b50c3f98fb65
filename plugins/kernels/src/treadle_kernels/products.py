"""Products of a few rows with stored matrices: the kernel of each format, and a product shared between threads.

Kernels are C functions that compiled code calls by their address: each is compiled once, and what calls them is
compiled once for all formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from treadle_kernels.chunks import begin_commit, end_commit, take_chunk
from treadle_kernels.compiled import entry_point, kernel
from treadle_kernels.emit import I64
from treadle_kernels.machine import Machine
from treadle_kernels.memory import pointer
from treadle_kernels.tiles import dot_strip

# Constants of the compiled code, cut for the machine's registers.
TILE_ROWS = Machine.of_host().tile_rows
TILE_WEIGHTS = Machine.of_host().tile_weights

# Rows of x that a chunk treats: so many, normalised, stay in the second-level cache.
BLOCK_ROWS = 48
NUM_ARGUMENTS = 12


def make_kernel(stored: str) -> Any:
    """Make the product for matrices of a stored format, a C function of twelve int64.

    It fills out `[num_x, count]` with x `[num_x, k]` times `count` rows at the address `weight`, turned:
    `tiles.dot_strip` for as many rows of x at once as there are registers for.
    """

    @kernel(types.void(*[types.int64] * NUM_ARGUMENTS))
    def multiply(weight, stride, count, scales, scale_stride, shift, x, x_stride, num_x, k, out, out_stride):
        matrix = (weight, stride, count, scales, scale_stride, shift)
        while num_x >= TILE_ROWS:
            dot_strip(TILE_ROWS, TILE_WEIGHTS, stored, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - TILE_ROWS, x + TILE_ROWS * x_stride, out + TILE_ROWS * out_stride
        while num_x >= 2:
            dot_strip(2, TILE_WEIGHTS, stored, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - 2, x + 2 * x_stride, out + 2 * out_stride
        while num_x >= 1:
            dot_strip(1, TILE_WEIGHTS, stored, matrix, (x, x_stride, k, out, out_stride))
            num_x, x, out = num_x - 1, x + x_stride, out + out_stride

    return multiply


@intrinsic
def multiply_by(typing: Any, kernel: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of its arguments."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * NUM_ARGUMENTS)
        values = [builder.extract_value(args[1], place) for place in range(NUM_ARGUMENTS)]
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, NUM_ARGUMENTS)), codegen


@njit(nogil=True)
def count_pieces(segments, chunk_rows):
    """Return how many pieces of up to chunk_rows rows the segments are cut in."""
    pieces = 0
    for segment in range(len(segments)):
        pieces += (segments[segment, 1] + chunk_rows - 1) // chunk_rows
    return pieces


@njit(nogil=True)
def find_piece(segments, chunk_rows, piece):
    """Return the segment that a piece lies in, and the first of its rows there."""
    segment = 0
    while piece >= count_pieces(segments[segment : segment + 1], chunk_rows):
        piece -= count_pieces(segments[segment : segment + 1], chunk_rows)
        segment += 1
    return segment, piece * chunk_rows


@entry_point
def linear(kernel, shift, segments, x, out, chunk_rows, control, operation, scratch):
    """Fill out `[rows, out]` with x `[rows, in]` times the segments of a matrix, turned. All threads call it at once.

    segments `[n, 6] int64`: first output column, number of rows, address, row stride, address and stride of scales, of
    which each 2^shift numbers have one; all of the format whose kernel's address is given. A chunk is `chunk_rows` rows
    of a segment by BLOCK_ROWS rows of x. scratch `[BLOCK_ROWS * chunk_rows]` is the thread's own.
    """
    rows, k = x.shape
    pieces, made = count_pieces(segments, chunk_rows), np.int64(scratch.ctypes.data)
    while True:
        chunk = take_chunk(control, operation, pieces * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS))
        if chunk < 0:
            return
        start = (chunk // pieces) * BLOCK_ROWS
        segment, row = find_piece(segments, chunk_rows, chunk % pieces)
        stride, scale_stride, column = segments[segment, 3], segments[segment, 5], segments[segment, 0] + row
        count, num_x = min(chunk_rows, segments[segment, 1] - row), min(BLOCK_ROWS, rows - start)
        matrix = (segments[segment, 2] + row * stride, stride, count, segments[segment, 4] + row * scale_stride)
        source = np.int64(x[start].ctypes.data)
        multiply_by(kernel, (*matrix, scale_stride, shift, source, x.strides[0], num_x, k, made, 4 * count))
        if begin_commit(control, operation, chunk):
            result = carray(pointer(made), (num_x, count), np.float32)
            out[start : start + num_x, column : column + count] = result
            end_commit(control, operation, chunk)
