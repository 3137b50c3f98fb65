"""The vector kernels, each an intrinsic that emits its own LLVM code. Everything else is plain numba around them.

Addresses are int64, strides are in bytes, and nothing need be aligned. A tile's size is known when code is emitted, so
that its sums stay in registers. Each output element has one order of summation, whatever the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import F32, FLOATS, HALF_SHORTS, LANES, SHORTS, Emitter, Value
from treadle_kernels.vectors import Place, each_vector, kernel, reduce


def _zeros(e: Emitter, rows: int, columns: int) -> list[list[Value]]:
    """Variables of 16 lanes, 0 at first."""
    zero = e.splat(0.0)
    return [[cgutils.alloca_once_value(e.builder, zero) for _ in range(columns)] for _ in range(rows)]


def _whole(e: Emitter, count: Value) -> Value:
    """The largest multiple of 16 that is not above count."""
    return e.builder.and_(count, e.number(-LANES))


LINE = 64  # bytes of memory that come together


@dataclass(frozen=True, slots=True)
class Form:
    """How a product takes rows, some numbers at once.

    Attributes:
        step: how many numbers of each row.
        stored: the vector that those of weights are; they take a line of memory.
        given: one that those of x are, packed, of which there are `parts`.
    """

    step: int
    stored: Any
    given: Any
    parts: int = 1

    @property
    def given_bytes(self) -> int:
        """What the numbers of x take."""
        return LINE * self.parts


FORMS = MappingProxyType(
    {
        "float32": Form(LANES, FLOATS, FLOATS),
        "bfloat16": Form(2 * LANES, SHORTS, FLOATS, parts=2),
        "bfloat16_rounded": Form(2 * LANES, SHORTS, SHORTS),
    }
)


@intrinsic(prefer_literal=True)
def dot_strip(typing: Any, num_x: Any, num_weights: Any, form: Any, matrix: Any, rows: Any) -> Any:
    """Fill out `[num_x, count]` float32 with packed rows of x `[num_x, k]` times rows of weights `[count, k]`, turned.

    num_x and num_weights are literals, the size of a tile, and so is `form`, of `FORMS`. `matrix` is (weights, stride,
    count, fetched, pace): memory is fetched from the address `fetched` on, so many bytes for each step of a tile.
    `rows` is (x, stride, k, out, stride of out), x as `pack_row` leaves it.

    Each element is 16 sums, one for each place in a vector, over k in ascending order; then those are folded.
    """
    size = (num_x.literal_value, num_weights.literal_value)
    tuples = (types.UniTuple(types.int64, 5), types.UniTuple(types.int64, 5))
    signature = types.void(num_x, num_weights, form, *tuples)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weight, stride, count, fetched, pace = cgutils.unpack_tuple(e.builder, args[3])
        x, x_stride, k, out, out_stride = cgutils.unpack_tuple(e.builder, args[4])
        (rows, columns), own = size, FORMS[form.literal_value]
        tiles, steps = e.builder.sdiv(count, e.number(columns)), e.builder.sdiv(k, e.number(own.step))
        with cgutils.for_range_slice(e.builder, e.number(0), tiles, e.number(1)) as (tile, _):
            row = e.times(tile, columns)
            line = e.at(fetched, e.builder.mul(e.builder.mul(tile, steps), pace))
            ahead = (line, pace) if rows > 1 else None
            source = (own, e.at(weight, e.builder.mul(row, stride)), stride)
            _dot_tile(e, size, source, ahead, (x, x_stride, k), (e.at(out, e.times(row, 4)), out_stride))
        with cgutils.for_range_slice(e.builder, e.times(tiles, columns), count, e.number(1)) as (row, _):
            source = (own, e.at(weight, e.builder.mul(row, stride)), stride)
            _dot_tile(e, (rows, 1), source, None, (x, x_stride, k), (e.at(out, e.times(row, 4)), out_stride))

    return signature, kernel(emit)


def _dot_tile(e: Emitter, size: tuple[int, int], source: Any, fetched: Any, inputs: Any, output: Any) -> None:
    """Multiply `size[0]` rows of x with `size[1]` rows of weights; fetched is an address and a pace, or None."""
    (rows, columns), sums, (out, out_stride) = size, _zeros(e, *size), output
    # A row of x by itself meets one row of weights after the other, in the order of addresses: memory is faster so.
    for some in [range(columns)] if rows > 1 else [[column] for column in range(columns)]:
        _dot_columns(e, source, fetched, inputs, sums, some)
    first = 0
    while first < rows:
        # Rows are folded together, as many as fit a vector: they share its instructions.
        count = max(some for some in (1, 2, 4) if first + some <= rows and some * columns <= LANES)
        totals = e.total([e.builder.load(one) for row in sums[first : first + count] for one in row])
        for row in range(count):
            own = e.lanes(totals, row * columns, columns)
            e.store(own, e.at(out, e.times(out_stride, first + row)))
        first += count


def _dot_columns(e: Emitter, source: Any, fetched: Any, inputs: Any, sums: Any, columns: Sequence[int]) -> None:
    """Add to the sums of some rows of weights, by number, their products with all rows of x."""
    (form, weights, stride), (x, x_stride, k) = source, inputs

    def add(step: Value, mask: Value | None) -> None:
        at = [e.at(weights, e.times(stride, column), e.times(step, LINE)) for column in columns]
        from_x = [e.at(x, e.times(x_stride, row), e.times(step, form.given_bytes)) for row in range(len(sums))]
        _dot_step(e, form, [[row[column] for column in columns] for row in sums], at, from_x, mask)

    steps = e.builder.sdiv(k, e.number(form.step))
    with cgutils.for_range_slice(e.builder, e.number(0), steps, e.number(1)) as (step, _):
        if fetched is not None:
            # In the order of addresses, though a tile reads several rows at once.
            line = e.at(fetched[0], e.builder.mul(step, fetched[1]))
            for place in range(len(columns)):
                e.prefetch(e.at(line, e.number(place * LINE)))
        add(step, None)
    rest = e.builder.sub(k, e.times(steps, form.step))
    with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
        add(steps, e.lanes_below(rest, form.step))


def _dot_step(e: Emitter, form: Form, sums: Any, weights: Sequence[Value], x: Sequence[Value], mask: Any) -> None:
    """Add to the sums the products of what lies at some addresses, as far as a mask says."""
    rounded = form.given is SHORTS
    multiply = e.add_pairs if rounded else e.multiply_add
    for part in range(form.parts):
        if part > 0:
            e.barrier()  # registers do not suffice for both
        ats = [e.at(at, e.number(LINE * part)) for at in x]
        # Only float32 is multiplied unpacked as well, with no zeros behind it.
        xs = [e.load_some(form.given, at, mask if form.given is form.stored is FLOATS else None) for at in ats]
        for column, at in enumerate(weights):
            found = e.load_some(form.stored, at, mask)
            found = e.widen_pairs(found)[part] if form.parts > 1 else found
            for row, value in enumerate(xs):
                total = multiply(found, value, e.builder.load(sums[row][column]))
                e.builder.store(total, sums[row][column])


@intrinsic(prefer_literal=True)
def pack_row(typing: Any, form: Any, x: Any, k: Any, out: Any) -> Any:
    """Write a row of x `[k]` float32 as the product of a format wants it, with zeros up to a whole step.

    float32: as it is. bfloat16: of each 32 numbers those at even places, then those at odd ones. bfloat16_rounded: as
    bfloat16, in its order.
    """
    signature = types.void(form, *[types.int64] * 3)
    name, step = form.literal_value, FORMS[form.literal_value].step

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, k, out = args[1:]
        whole = e.builder.and_(k, e.number(-step))

        def pack(position: Value, masks: Sequence[Value | None]) -> None:
            ats = [e.at(x, e.times(position, 4), e.number(4 * LANES * part)) for part in range(len(masks))]
            found = [e.load_some(FLOATS, at, mask) for at, mask in zip(ats, masks, strict=True)]
            _store_packed(e, name, found, e.at(out, e.times(position, FORMS[name].given_bytes // step)))

        with cgutils.for_range_slice(e.builder, e.number(0), whole, e.number(step)) as (position, _):
            pack(position, [None] * (step // LANES))
        rest = e.builder.sub(k, whole)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            left = [e.builder.sub(rest, e.number(start)) for start in range(0, step, LANES)]
            pack(whole, [e.lanes_below(count) for count in left])

    return signature, kernel(emit)


def _store_packed(e: Emitter, form: str, found: Sequence[Value], out: Value) -> None:
    """Write a step of a packed row."""
    if form == "bfloat16":
        found = e.pair(*found)
    elif form == "bfloat16_rounded":
        found = [e.round(one) for one in found]
    for part, one in enumerate(found):
        e.store(one, e.at(out, e.number(part * FORMS[form].given_bytes // len(found))))


# Keys and values of a sequence are kept in float32 or rounded: the vector that 16 of them are, and the bytes of one.
KEPT = MappingProxyType({"float32": (FLOATS, 4), "bfloat16": (HALF_SHORTS, 2)})


@intrinsic(prefer_literal=True)
def mix_strip(
    typing: Any, num_rows: Any, kept: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, count: Any,
    dim: Any, out: Any, out_stride: Any, fetched: Any
) -> Any:  # fmt: skip
    """Fill out `[num_rows, dim]` float32 with weights `[num_rows, count]` @ values `[count, dim]`, summed in order.

    num_rows and kept, how values are kept, of `KEPT`, are literals. From the address `fetched` on memory is fetched
    meanwhile, as much as values are and laid out like them.
    """
    rows, form = num_rows.literal_value, KEPT[kept.literal_value]
    signature = types.void(num_rows, kept, *[types.int64] * 9)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weights, weight_stride, values, value_stride, count, dim, out, out_stride, fetched = args[2:]
        sources = (form, weights, weight_stride, values, value_stride, count, fetched)
        many, whole = e.builder.and_(dim, e.number(-4 * LANES)), _whole(e, dim)
        for width, start, stop in ((4, e.number(0), many), (1, many, whole)):
            with cgutils.for_range_slice(e.builder, start, stop, e.number(width * LANES)) as (column, _):
                _mix_tile(e, (rows, width), sources, (out, out_stride), column, None)
        rest = e.builder.sub(dim, whole)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            _mix_tile(e, (rows, 1), sources, (out, out_stride), whole, e.lanes_below(rest))

    return signature, kernel(emit)


def _mix_tile(e: Emitter, size: Any, sources: Any, output: Any, column: Value, mask: Value | None) -> None:
    """Mix the values at `size[1]` vectors of columns for `size[0]` rows of weights."""
    (rows, width), (out, out_stride) = size, output
    (vector, item_bytes), weights, weight_stride, values, value_stride, count, fetched = sources
    place, vector_bytes = e.times(column, item_bytes), LANES * item_bytes
    sums = _zeros(e, rows, width)
    with cgutils.for_range_slice(e.builder, e.number(0), count, e.number(1)) as (token, _):
        offset = e.builder.mul(token, value_stride)
        for line in range(0, width * vector_bytes, LINE):
            e.prefetch(e.at(fetched, offset, place, e.number(line)))
        ats = [e.at(values, offset, place, e.number(number * vector_bytes)) for number in range(width)]
        found = [e.load_some(vector, at, mask) for at in ats]
        found = found if vector is FLOATS else [e.widen(one) for one in found]
        for row in range(rows):
            share = e.spread(e.load(F32, e.at(weights, e.times(weight_stride, row), e.times(token, 4))))
            for number, value in enumerate(found):
                variable = sums[row][number]
                e.builder.store(e.multiply_add(share, value, e.builder.load(variable)), variable)
    for row in range(rows):
        for number, variable in enumerate(sums[row]):
            at = e.at(out, e.times(out_stride, row), e.times(column, 4), e.number(4 * LANES * number))
            e.store_some(e.builder.load(variable), at, mask)


@intrinsic
def round_row(typing: Any, x: Any, count: Any, out: Any) -> Any:
    """Write x `[count]` float32 as bfloat16, to the nearest."""
    signature = types.void(*[types.int64] * 3)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, count, out = args
        each_vector(e, count, lambda place: place.store_rounded(place.load(x), out))

    return signature, kernel(emit)


@intrinsic
def fetch(typing: Any, address: Any, num_bytes: Any) -> Any:
    """Have memory brought to the second-level cache while other things are done."""
    signature = types.void(types.int64, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        with cgutils.for_range_slice(e.builder, e.number(0), args[1], e.number(LINE)) as (offset, _):
            e.prefetch(e.at(args[0], offset))

    return signature, kernel(emit)


@intrinsic
def largest_of_row(typing: Any, x: Any, count: Any) -> Any:
    """Return the largest of x `[count]`."""
    signature = types.float32(*[types.int64] * 2)

    def emit(e: Emitter, args: Sequence[Value]) -> Value:
        x, count = args
        return reduce(e, count, e.splat(float("-inf")), e.maximum, lambda place: place.load(x))

    return signature, kernel(emit)


@intrinsic
def exp_row(typing: Any, x: Any, count: Any, scale: Any, top: Any) -> Any:
    """Put exp(scale * (x - top)) in the place of x `[count]`; return their sum, of 16 parts, which are folded.

    With NaN in x, or where x and top are infinite, the sum is NaN.
    """
    signature = types.float32(types.int64, types.int64, types.float32, types.float32)

    def emit(e: Emitter, args: Sequence[Value]) -> Value:
        x, count, scale, top = args
        scales, tops = e.spread(scale), e.spread(top)

        def raise_(place: Place) -> Value:
            exponent = e.builder.fmul(e.builder.fsub(place.load(x), tops), scales)
            power = e.exp(exponent)
            place.store(power, x)
            return power

        return reduce(e, count, e.splat(0.0), e.builder.fadd, raise_)

    return signature, kernel(emit)


@intrinsic
def silu_gate(typing: Any, gate: Any, up: Any, count: Any, out: Any) -> Any:
    """Fill out `[count]` float32 with gate / (1 + exp(-gate)) * up."""
    signature = types.void(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        gate, up, count, out = args
        one, zero = e.splat(1.0), e.splat(0.0)

        def apply(place: Place) -> None:
            gates = place.load(gate)
            below = e.builder.fadd(e.exp(e.builder.fsub(zero, gates)), one)
            place.store(e.builder.fmul(e.builder.fdiv(gates, below), place.load(up)), out)

        each_vector(e, count, apply)

    return signature, kernel(emit)
