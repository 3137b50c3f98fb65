"""The vector kernels of training that treat matrices: outer products, and transposition.

As in `tiles`: addresses are int64, strides are in bytes, nothing need be aligned, and each sum has one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import F32, FLOATS, LANES, Emitter, Value
from treadle_kernels.machine import Machine
from treadle_kernels.vectors import Place, kernel

# A tile of an outer product: its rows, and vectors of its width, widest first; narrower ones take what is left.
# 24 sums of 16 lanes fill 32 registers of 512 bits, beside four vectors of b; smaller registers take several for one.
IS_WIDE = "+avx512f" in Machine.of_host().features
TILE_ROWS, WIDTHS = (6, (4, 2, 1)) if IS_WIDE else (2, (2, 1))


@intrinsic(prefer_literal=True)
def outer_strip(
    typing: Any, num_rows: Any, adding: Any, a: Any, b: Any, out: Any, count: Any, columns: Any
) -> Any:  # fmt: skip
    """Fill out `[num_rows, columns]` with a `[num_rows, count]` @ b `[count, columns]`, or add that to it.

    num_rows and adding are literals. a is (address, row stride, stride of count); b is (address, stride of count), a
    row of it lies close; out is (address, row stride). Each element is one sum, over count in ascending order.
    """
    rows, is_added = num_rows.literal_value, adding.literal_value
    three, two = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2)
    signature = types.void(num_rows, adding, three, two, two, types.int64, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        a, b, out = (cgutils.unpack_tuple(e.builder, arg) for arg in args[2:5])
        count, columns = args[5], args[6]
        start = e.number(0)
        for width in WIDTHS:
            stop = e.builder.and_(columns, e.number(-width * LANES))
            with cgutils.for_range_slice(e.builder, start, stop, e.number(width * LANES)) as (column, _):
                _outer_tile(e, (rows, width, is_added), (a, b, out), count, Place(e, e.times(column, 4), None))
            start = stop
        rest = e.builder.sub(columns, start)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            place = Place(e, e.times(start, 4), e.lanes_below(rest))
            _outer_tile(e, (rows, 1, is_added), (a, b, out), count, place)

    return signature, kernel(emit)


def _outer_tile(e: Emitter, size: Any, operands: Any, count: Value, place: Place) -> None:
    """Multiply `size[0]` rows of a with `size[1]` vectors of columns of b; sums stay in registers."""
    (rows, width, is_added), ((a, a_row, a_step), (b, b_step), (out, out_row)) = size, operands
    spots = [[e.at(out, e.times(out_row, r), e.number(4 * LANES * v)) for v in range(width)] for r in range(rows)]
    sums = [
        [cgutils.alloca_once_value(e.builder, place.load(spot) if is_added else e.splat(0.0)) for spot in row]
        for row in spots
    ]
    with cgutils.for_range_slice(e.builder, e.number(0), count, e.number(1)) as (step, _):
        base = e.at(b, e.builder.mul(step, b_step))
        values = [place.load(e.at(base, e.number(4 * LANES * vector))) for vector in range(width)]
        at = e.at(a, e.builder.mul(step, a_step))
        for row in range(rows):
            share = e.spread(e.load(F32, e.at(at, e.times(a_row, row))))
            for value, variable in zip(values, sums[row], strict=True):
                e.builder.store(e.multiply_add(share, value, e.builder.load(variable)), variable)
    for row in range(rows):
        for spot, variable in zip(spots[row], sums[row], strict=True):
            place.store(e.builder.load(variable), spot)


@intrinsic
def turn_tile(typing: Any, source: Any, stride: Any, out: Any, out_stride: Any) -> Any:
    """Fill out `[16, 16]` with source `[16, 16]`, turned: rows become columns."""
    signature = types.void(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        source, stride, out, out_stride = args
        rows = [e.load(FLOATS, e.at(source, e.times(stride, row))) for row in range(LANES)]
        for number, row in enumerate(e.transpose(rows)):
            e.store(row, e.at(out, e.times(out_stride, number)))

    return signature, kernel(emit)
