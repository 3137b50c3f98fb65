"""Products of a few rows with stored matrices: the kernel of each format, and a product shared between threads.

Kernels are C functions that compiled code calls by their address: each is compiled once, and what calls them is
compiled once for all formats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, register_jitable

from treadle_kernels.amx_products import BESIDE_BYTES, ROW_BYTES, tile_functions
from treadle_kernels.amx_tiles import TERMS
from treadle_kernels.chunks import begin_commit, end_commit, take_chunk
from treadle_kernels.compiled import entry_point, kernel
from treadle_kernels.emit import I64
from treadle_kernels.machine import Machine
from treadle_kernels.memory import pointer
from treadle_kernels.tiles import FORMS, LINE, dot_strip, pack_row

# Constants of the compiled code, cut for the machine's registers.
TILE_ROWS = Machine.of_host().tile_rows
TILE_WEIGHTS = Machine.of_host().tile_weights
HALF_ROWS = min(TILE_ROWS, 4)  # eight streams are two such tiles

# How far ahead of a tile of several rows memory is fetched: some hundred nanoseconds at the speed that it is read.
TILE_AHEAD = 16384
# What rows of x pass by one after the other: so many bytes of weights stay in the first-level cache beside them.
BLOCK_BYTES = 16384
# Rows of x that a chunk treats: so many, packed, stay in the second-level cache.
BLOCK_ROWS = 48
# Rows that may be packed as one, so that there is room for as many; BLOCK_ROWS is some times that.
ROW_GROUP = 16
MULTIPLY_ARGUMENTS, PACK_ARGUMENTS = 10, 5
# What a packed row takes of each 32 numbers, in float32, and beside them.
TILES = Machine.of_host().tiles
FLOATS_A_STEP, FLOATS_BESIDE = (ROW_BYTES // 4, BESIDE_BYTES // 4) if TILES else (32, 0)


class Kernels(NamedTuple):
    """The product of a format: addresses of `pack` and `multiply`.

    `pack(x, x_stride, num_x, k, out) -> int64` writes rows of x `[num_x, k]` float32 as `multiply` wants them, in at
    most `packed_floats(k)` float32 a row, with room for a multiple of ROW_GROUP rows, and returns the stride that it
    wants with them.

    `multiply(weight, stride, row, count, x, x_stride, num_x, k, out, out_stride)` fills out `[num_x, count]` float32
    with packed x times `count` rows of the matrix at `weight` from `row` on, turned; stride: bytes of a row, or of a
    panel of rows.
    """

    pack: Any
    multiply: Any


@njit(nogil=True)
def _num_passes(num_x):
    """Return how many tiles rows of x are cut in."""
    rest = num_x % TILE_ROWS
    passes = num_x // TILE_ROWS + rest // HALF_ROWS
    return passes + (1 if rest % HALF_ROWS > 0 else 0)


@register_jitable
def packed_floats(k: int) -> int:
    """Return the room for a packed row, in float32, where there is room for whole groups of ROW_GROUP."""
    return (k + 31) // 32 * FLOATS_A_STEP + FLOATS_BESIDE


def make_kernels(form: str) -> tuple[Any, Any]:
    """Make `pack` and `multiply` for matrices of a format of `tiles.FORMS`, as C functions; see `Kernels`."""
    pack, multiply = tile_functions(form) if TILES and form in TERMS else _vector_functions(form)
    packing, multiplying = types.int64(*[types.int64] * PACK_ARGUMENTS), types.void(*[types.int64] * MULTIPLY_ARGUMENTS)
    return kernel(packing)(pack), kernel(multiplying)(multiply)


def block_function(form: str) -> Any:
    """Make the product of packed x with rows of weights that stay in the first-level cache, not compiled yet.

    It fills out `[num_x, count]`; from the address `fetched` on as much memory as the weights are is fetched meanwhile.
    """

    @register_jitable
    def multiply_block(weight, stride, count, x, x_stride, num_x, k, out, out_stride, fetched):
        # All passes but the first find the weights in the cache: each fetches its share, so that memory and arithmetic
        # are busy all the time.
        passes = _num_passes(num_x)
        share, pace = count * stride // passes, TILE_WEIGHTS * LINE // passes
        while num_x > 0:
            matrix = (weight, stride, count, fetched, pace)
            if num_x >= TILE_ROWS:
                dot_strip(TILE_ROWS, TILE_WEIGHTS, form, matrix, (x, x_stride, k, out, out_stride))
                done = TILE_ROWS
            elif num_x >= HALF_ROWS:
                dot_strip(HALF_ROWS, TILE_WEIGHTS, form, matrix, (x, x_stride, k, out, out_stride))
                done = HALF_ROWS
            elif num_x == 3:
                dot_strip(3, TILE_WEIGHTS, form, matrix, (x, x_stride, k, out, out_stride))
                done = 3
            elif num_x == 2:
                dot_strip(2, TILE_WEIGHTS, form, matrix, (x, x_stride, k, out, out_stride))
                done = 2
            else:
                dot_strip(1, TILE_WEIGHTS, form, matrix, (x, x_stride, k, out, out_stride))
                done = 1
            num_x, x, out, fetched = num_x - done, x + done * x_stride, out + done * out_stride, fetched + share

    return multiply_block


def row_packer(form: str) -> Any:
    """Make `pack` of a format for tiles in vector registers, not compiled yet; see `Kernels`."""
    step, step_bytes = FORMS[form].step, FORMS[form].given_bytes

    def pack(x, x_stride, num_x, k, out):
        size = (k + step - 1) // step * step_bytes
        for row in range(num_x):
            pack_row(form, x + row * x_stride, k, out + row * size)
        return size

    return pack


def _vector_functions(form: str) -> tuple[Any, Any]:
    """Make `pack` and `multiply` of tiles in vector registers, not compiled yet."""
    multiply_block = block_function(form)

    def multiply(weight, stride, row, count, x, x_stride, num_x, k, out, out_stride):
        block = max(1, BLOCK_BYTES // max(stride, 1) // TILE_WEIGHTS) * TILE_WEIGHTS
        for start in range(0, count, block):
            at, own = weight + (row + start) * stride, min(block, count - start)
            # A single pass fetches what it reads soon, several what lies behind these rows.
            fetched = at + (own * stride if _num_passes(num_x) > 1 else stride * TILE_WEIGHTS + TILE_AHEAD)
            multiply_block(at, stride, own, x, x_stride, num_x, k, out + 4 * start, out_stride, fetched)

    return row_packer(form), multiply


def caller_of(returns: Any, llvm_returns: Any, num_arguments: int) -> Any:
    """Make the call of a C function of so many int64 at an address, with a tuple of them."""

    @intrinsic
    def call(typing: Any, address: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(llvm_returns, [I64] * num_arguments)
            values = [builder.extract_value(args[1], place) for place in range(num_arguments)]
            result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
            return context.get_dummy_value() if returns == types.void else result

        return returns(types.int64, types.UniTuple(types.int64, num_arguments)), codegen

    return call


pack_by = caller_of(types.int64, I64, PACK_ARGUMENTS)
multiply_by = caller_of(types.void, ir.VoidType(), MULTIPLY_ARGUMENTS)


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
def linear(kernels, segments, x, out, chunk_rows, control, operation, scratch):
    """Fill out `[rows, out]` with x `[rows, in]` times the segments of a matrix, turned. All threads call it at once.

    segments `[n, 4] int64`: first output column, number of rows, address, bytes from row to row or from panel to panel;
    all of the format whose kernels are given. A chunk is `chunk_rows` rows of a segment by BLOCK_ROWS rows of x.
    scratch `[BLOCK_ROWS * (packed_floats(in) + chunk_rows)]` is the thread's own.
    """
    rows, k = x.shape
    pieces, current, packed_stride = count_pieces(segments, chunk_rows), -1, 0
    packed, made = np.int64(scratch.ctypes.data), np.int64(scratch[BLOCK_ROWS * packed_floats(k) :].ctypes.data)
    while True:
        chunk = take_chunk(control, operation, pieces * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS))
        if chunk < 0:
            return
        start = (chunk // pieces) * BLOCK_ROWS
        segment, row = find_piece(segments, chunk_rows, chunk % pieces)
        count, num_x = min(chunk_rows, segments[segment, 1] - row), min(BLOCK_ROWS, rows - start)
        if start != current:
            source = np.int64(x[start].ctypes.data)
            packed_stride, current = pack_by(kernels.pack, (source, x.strides[0], num_x, k, packed)), start
        matrix = (segments[segment, 2], segments[segment, 3], row, count)
        multiply_by(kernels.multiply, (*matrix, packed, packed_stride, num_x, k, made, 4 * count))
        if begin_commit(control, operation, chunk):
            column = segments[segment, 0] + row
            result = carray(pointer(made), (num_x, count), np.float32)
            out[start : start + num_x, column : column + count] = result
            end_commit(control, operation, chunk)
