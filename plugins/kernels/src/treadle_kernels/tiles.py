"""The vector kernels, each an intrinsic that emits its own LLVM code. Everything else is plain numba around them.

Addresses are int64, strides are in bytes, and nothing need be aligned. A tile's size is known when code is emitted, so
that its sums stay in registers. Each output element has one order of summation, whatever the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import F32, FLOATS, LANES, STORED, Emitter, Value
from treadle_kernels.machine import Machine


def _kernel(emit: Callable[..., None]) -> Callable[..., Any]:
    """Make a numba signature's code generator of a function that emits into a builder."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        emit(Emitter(builder, fused=Machine.of_host().fused), args)
        return context.get_dummy_value()

    return codegen


def _zeros(e: Emitter, rows: int, columns: int) -> list[list[Value]]:
    """Variables of 16 lanes, 0 at first."""
    zero = e.splat(0.0)
    return [[cgutils.alloca_once_value(e.builder, zero) for _ in range(columns)] for _ in range(rows)]


def _whole(e: Emitter, count: Value) -> Value:
    """The largest multiple of 16 that is not above count."""
    return e.builder.and_(count, e.number(-LANES))


@intrinsic(prefer_literal=True)
def dot_strip(typing: Any, num_x: Any, num_weights: Any, stored: Any, matrix: Any, rows: Any) -> Any:
    """Fill out `[num_x, count]` float32 with x `[num_x, k]` float32 times `count` rows of weights `[count, k]`, turned.

    num_x and num_weights are literals, the size of a tile, and so is `stored`, a format of `emit.STORED`. `matrix` is
    (weights, stride, count, scales, stride of scales, shift): rows of int8 have a float32 scale for each 2^shift of
    their numbers. `rows` is (x, stride, k, out, stride of out).

    Each element is 16 sums, one for each place in a vector, over k in ascending order; then those are folded.
    """
    size = (num_x.literal_value, num_weights.literal_value)
    tuples = (types.UniTuple(types.int64, 6), types.UniTuple(types.int64, 5))
    signature = types.void(num_x, num_weights, stored, *tuples)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weight, weight_stride, count, scales, scale_stride, shift = cgutils.unpack_tuple(e.builder, args[3])
        x, x_stride, k, out, out_stride = cgutils.unpack_tuple(e.builder, args[4])
        form = (stored.literal_value, weight_stride, scale_stride, shift)
        rows, columns = size
        wide = e.builder.sdiv(count, e.number(columns))
        many = e.times(wide, columns)
        for width, start, stop in ((columns, e.number(0), many), (1, many, count)):
            with cgutils.for_range_slice(e.builder, start, stop, e.number(width)) as (row, _):
                at = e.at(weight, e.builder.mul(row, weight_stride))
                scale = e.at(scales, e.builder.mul(row, scale_stride))
                output = (e.at(out, e.times(row, 4)), out_stride)
                _dot_tile(e, (rows, width), form, (at, scale), (x, x_stride, k), output)

    return signature, _kernel(emit)


def _dot_tile(e: Emitter, size: tuple[int, int], form: Any, weight: Any, inputs: Any, output: Any) -> None:
    """Multiply `size[0]` rows of x with `size[1]` rows of weights."""
    (rows, columns), (x, x_stride, k), (out, out_stride) = size, inputs, output
    sums = _zeros(e, rows, columns)
    whole = _whole(e, k)
    with cgutils.for_range_slice(e.builder, e.number(0), whole, e.number(LANES)) as (position, _):
        _dot_step(e, sums, form, weight, (x, x_stride), position, None)
    rest = e.builder.sub(k, whole)
    with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
        _dot_step(e, sums, form, weight, (x, x_stride), whole, e.lanes_below(rest))
    for row in range(rows):
        total = e.total([e.builder.load(one) for one in sums[row]])
        e.store(total, e.at(out, e.times(out_stride, row)))


def _dot_step(e: Emitter, sums: Any, form: Any, weight: Any, inputs: Any, position: Value, mask: Value | None) -> None:
    """Add the products at 16 positions to the sums."""
    (stored, weight_stride, scale_stride, shift), (weights, scales), (x, x_stride) = form, weight, inputs
    element, num_bytes = STORED[stored]

    def load(kind: Any, address: Value) -> Value:
        return e.load(kind, address) if mask is None else e.load_some(kind, address, mask)

    xs = [load(FLOATS, e.at(x, e.times(x_stride, row), e.times(position, 4))) for row in range(len(sums))]
    for column in range(len(sums[0])):
        at = e.at(weights, e.times(weight_stride, column), e.times(position, num_bytes))
        e.prefetch(e.at(at, e.times(weight_stride, len(sums[0]))))  # the next tile's: these come from memory
        w = e.widen(stored, load(ir.VectorType(element, LANES), at))
        if stored == "int8":
            group = e.times(e.builder.ashr(position, shift), 4)
            w = e.builder.fmul(w, e.spread(e.load(F32, e.at(scales, e.times(scale_stride, column), group))))
        for row, value in enumerate(xs):
            variable = sums[row][column]
            e.builder.store(e.multiply_add(w, value, e.builder.load(variable)), variable)


@intrinsic(prefer_literal=True)
def mix_strip(
    typing: Any, num_rows: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, count: Any, dim: Any,
    out: Any, out_stride: Any
) -> Any:  # fmt: skip
    """Fill out `[num_rows, dim]` float32 with weights `[num_rows, count]` @ values `[count, dim]`, summed in order."""
    rows = num_rows.literal_value
    signature = types.void(num_rows, *[types.int64] * 8)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weights, weight_stride, values, value_stride, count, dim, out, out_stride = args[1:]
        sources = (weights, weight_stride, values, value_stride, count)
        many, whole = e.builder.and_(dim, e.number(-4 * LANES)), _whole(e, dim)
        for width, start, stop in ((4, e.number(0), many), (1, many, whole)):
            with cgutils.for_range_slice(e.builder, start, stop, e.number(width * LANES)) as (column, _):
                _mix_tile(e, (rows, width), sources, (out, out_stride), column, None)
        rest = e.builder.sub(dim, whole)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            _mix_tile(e, (rows, 1), sources, (out, out_stride), whole, e.lanes_below(rest))

    return signature, _kernel(emit)


def _mix_tile(e: Emitter, size: Any, sources: Any, output: Any, column: Value, mask: Value | None) -> None:
    """Mix the values at `size[1]` vectors of columns for `size[0]` rows of weights."""
    (rows, width), (out, out_stride) = size, output
    weights, weight_stride, values, value_stride, count = sources
    places = [e.times(e.at(column, e.number(vector * LANES)), 4) for vector in range(width)]
    sums = _zeros(e, rows, width)
    with cgutils.for_range_slice(e.builder, e.number(0), count, e.number(1)) as (token, _):
        base = e.at(values, e.builder.mul(token, value_stride))
        ats = [e.at(base, place) for place in places]
        found = [e.load(FLOATS, at) if mask is None else e.load_some(FLOATS, at, mask) for at in ats]
        for row in range(rows):
            share = e.spread(e.load(F32, e.at(weights, e.times(weight_stride, row), e.times(token, 4))))
            for vector, value in enumerate(found):
                variable = sums[row][vector]
                e.builder.store(e.multiply_add(share, value, e.builder.load(variable)), variable)
    for row in range(rows):
        for vector, place in enumerate(places):
            at, total = e.at(out, e.times(out_stride, row), place), e.builder.load(sums[row][vector])
            if mask is None:
                e.store(total, at)
            else:
                e.store_some(total, at, mask)


@intrinsic
def softmax_row(typing: Any, x: Any, count: Any, scale: Any) -> Any:
    """Turn x `[count]` float32 into exp(scale * (x - max)) / sum in place; the sum has 16 parts, which are folded."""
    signature = types.void(types.int64, types.int64, types.float32)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, count, scale = args
        least, scales = e.splat(-3.0e38), e.spread(scale)
        largest = cgutils.alloca_once_value(e.builder, least)

        def look(at: Value, mask: Value | None) -> None:
            found = e.load(FLOATS, at) if mask is None else e.builder.select(mask, e.load_some(FLOATS, at, mask), least)
            e.builder.store(e.maximum(found, e.builder.load(largest)), largest)

        _each_vector(e, x, count, look)
        top = e.spread(_scalar(e, e.fold([e.builder.load(largest)], e.maximum)))
        sums = _zeros(e, 1, 1)[0][0]

        def raise_(at: Value, mask: Value | None) -> None:
            found = e.load(FLOATS, at) if mask is None else e.load_some(FLOATS, at, mask)
            power = e.exp(e.builder.fmul(e.builder.fsub(found, top), scales))
            counted = power if mask is None else e.builder.select(mask, power, e.splat(0.0))
            e.builder.store(e.builder.fadd(e.builder.load(sums), counted), sums)
            if mask is None:
                e.store(power, at)
            else:
                e.store_some(power, at, mask)

        _each_vector(e, x, count, raise_)
        total = e.spread(_scalar(e, e.total([e.builder.load(sums)])))

        def divide(at: Value, mask: Value | None) -> None:
            if mask is None:
                e.store(e.builder.fdiv(e.load(FLOATS, at), total), at)
            else:
                e.store_some(e.builder.fdiv(e.load_some(FLOATS, at, mask), total), at, mask)

        _each_vector(e, x, count, divide)

    return signature, _kernel(emit)


@intrinsic
def silu_gate(typing: Any, gate: Any, up: Any, count: Any, out: Any) -> Any:
    """Fill out `[count]` float32 with gate / (1 + exp(-gate)) * up."""
    signature = types.void(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        gate, up, count, out = args
        one, zero = e.splat(1.0), e.splat(0.0)

        def apply(at: Value, mask: Value | None) -> None:
            offset = e.builder.sub(at, gate)
            places = (at, e.at(up, offset))
            gates, ups = (e.load(FLOATS, p) if mask is None else e.load_some(FLOATS, p, mask) for p in places)
            below = e.builder.fadd(e.exp(e.builder.fsub(zero, gates)), one)
            result = e.builder.fmul(e.builder.fdiv(gates, below), ups)
            if mask is None:
                e.store(result, e.at(out, offset))
            else:
                e.store_some(result, e.at(out, offset), mask)

        _each_vector(e, gate, count, apply)

    return signature, _kernel(emit)


def _each_vector(e: Emitter, x: Value, count: Value, apply: Callable[[Value, Value | None], None]) -> None:
    """Call apply with the address of 16 floats at a time, and a mask for the rest."""
    whole = _whole(e, count)
    with cgutils.for_range_slice(e.builder, e.number(0), whole, e.number(LANES)) as (place, _):
        apply(e.at(x, e.times(place, 4)), None)
    rest = e.builder.sub(count, whole)
    with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
        apply(e.at(x, e.times(whole, 4)), e.lanes_below(rest))


def _scalar(e: Emitter, vector: Value) -> Value:
    return e.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))
