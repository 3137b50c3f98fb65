"""Matrix products of training, each on one thread: the forward pass's, and both of the backward pass.

A product is cut four times: in columns that fit in the last-level cache, in runs of DEPTH terms, whose share of b is
packed in panels as wide as a tile; in blocks of rows, whose share of a stays in the second-level cache beside a panel;
and in tiles, whose sums stay in registers (Goto and van de Geijn 2008). An element is one sum in ascending order,
whatever else is multiplied with it.

Matrices are addresses with strides in bytes: a is (address, row stride, step stride), b (address, step stride, column
stride), out (address, row stride); one stride of a and of b is that of a float.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from treadle_kernels.compiled import entry_point
from treadle_kernels.emit import LANES
from treadle_kernels.memory import floats_at
from treadle_kernels.training_tiles import TILE_ROWS, WIDTHS, outer_strip, turn_tile

PANEL = WIDTHS[0] * LANES  # columns
DEPTH = 576
BLOCK_ROWS = 96
BLOCK_COLUMNS = 1024
# Floats that a product needs beside what it is given: b's panels, and a block of an a that is turned.
ROOM = (BLOCK_COLUMNS + BLOCK_ROWS) * DEPTH


@njit(nogil=True)
def outer_rows(num_rows, is_added, a, b, out, count, columns):
    """Fill out `[num_rows, columns]` like `outer_strip`, as many rows at once as there are registers for."""
    (at, row, step), (target, target_row) = a, out
    while num_rows >= TILE_ROWS:
        if is_added:
            outer_strip(TILE_ROWS, True, (at, row, step), b, (target, target_row), count, columns)
        else:
            outer_strip(TILE_ROWS, False, (at, row, step), b, (target, target_row), count, columns)
        num_rows, at, target = num_rows - TILE_ROWS, at + TILE_ROWS * row, target + TILE_ROWS * target_row
    while num_rows >= 1:
        if is_added:
            outer_strip(1, True, (at, row, step), b, (target, target_row), count, columns)
        else:
            outer_strip(1, False, (at, row, step), b, (target, target_row), count, columns)
        num_rows, at, target = num_rows - 1, at + row, target + target_row


@njit(nogil=True)
def turn(source, stride, rows, columns, out, out_stride):
    """Fill out `[columns, rows]` with source `[rows, columns]`, turned; both are addresses."""
    whole_rows, whole_columns = rows & -LANES, columns & -LANES
    for row in range(0, whole_rows, LANES):
        for column in range(0, whole_columns, LANES):
            at = out + column * out_stride + 4 * row
            turn_tile(source + row * stride + 4 * column, stride, at, out_stride)
    _turn_singly(source, stride, 0, whole_rows, whole_columns, columns, out, out_stride)
    _turn_singly(source, stride, whole_rows, rows, 0, columns, out, out_stride)


@njit(nogil=True)
def _turn_singly(source, stride, first_row, rows, first_column, columns, out, out_stride):
    for row in range(first_row, rows):
        for column in range(first_column, columns):
            floats_at(out + column * out_stride + 4 * row, 1)[0] = floats_at(source + row * stride + 4 * column, 1)[0]


@njit(nogil=True)
def _pack(b, depth, columns, room):
    """Fill room with b `[depth, columns]` in panels `[depth, PANEL]`."""
    (source, step, column_stride), row_bytes = b, 4 * PANEL
    for start in range(0, columns, PANEL):
        width, at = min(PANEL, columns - start), source + start * column_stride
        panel = room + start * depth * 4
        if column_stride != 4:
            turn(at, column_stride, width, depth, panel, row_bytes)
        else:
            for number in range(depth):
                floats_at(panel + number * row_bytes, width)[:] = floats_at(at + number * step, width)


@njit(nogil=True)
def _multiply_block(a, panels, out, rows, depth, columns, is_added, room):
    """Multiply rows of a, `depth` terms of them, with packed panels."""
    (source, row_stride, step), (target, target_row) = a, out
    for start in range(0, rows, BLOCK_ROWS):
        count, at = min(BLOCK_ROWS, rows - start), (source + start * row_stride, row_stride, step)
        if step != 4:
            turn(at[0], step, depth, count, room, 4 * depth)
            at = (room, 4 * depth, np.int64(4))
        for column in range(0, columns, PANEL):
            panel, width = (panels + column * depth * 4, np.int64(4 * PANEL)), min(PANEL, columns - column)
            place = (target + start * target_row + 4 * column, target_row)
            outer_rows(count, is_added, at, panel, place, depth, width)


@entry_point
def multiply(a, b, out, shape, is_added, room):
    """Fill out `[rows, columns]` with a `[rows, terms]` @ b `[terms, columns]`, or add that to it.

    shape is (rows, terms, columns), terms 1 at least; room `[ROOM] float32`.
    """
    (source, row, step), (matrix, term, column), (target, target_row), (rows, terms, columns) = a, b, out, shape
    panels = np.int64(room.ctypes.data)
    block = panels + 4 * BLOCK_COLUMNS * DEPTH
    for left in range(0, columns, BLOCK_COLUMNS):
        width = min(BLOCK_COLUMNS, columns - left)
        for first in range(0, terms, DEPTH):
            depth = min(DEPTH, terms - first)
            _pack((matrix + first * term + left * column, term, column), depth, width, panels)
            at, place = (source + first * step, row, step), (target + 4 * left, target_row)
            _multiply_block(at, panels, place, rows, depth, width, is_added or first > 0, block)
