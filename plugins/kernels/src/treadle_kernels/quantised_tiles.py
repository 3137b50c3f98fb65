"""The kernels of quantised weights: activations rounded to int8, and their products with panels of int8 or int4.

A panel is 16 rows of a matrix, one for each lane, turned so that a vector holds some consecutive numbers of each:

    for each group of 32 numbers: 16 scales in bfloat16, and then
    int8: for each 4 numbers, 64 bytes: 16 rows x 4 numbers, plus 128 each
    int4: for each 8 numbers, 64 bytes: 16 rows x 4 bytes, whose low halves are numbers 0 to 3 and whose high halves are
          numbers 4 to 7, plus 8 each

So a matrix is read from its beginning to its end without a gap, and no lanes are ever added up. Activations are packed
once (see `pack_row`) and then multiplied with many panels. The products of a group are summed in integers, exactly;
groups are added in float32, in ascending order. Each output element has this one order, whatever the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from treadle_plugin_api.backend import GROUP_SIZE

from treadle_kernels.emit import F32, FLOATS, HALF_SHORTS, I8, I32, INTS, LANES, ROUND, SHORTS, Emitter, Value
from treadle_kernels.machine import Machine

GROUP, PANEL_ROWS = GROUP_SIZE, LANES
# Bits of a number, and what is added to it so that it is stored unsigned.
OFFSETS = {8: 128, 4: 8}
# Bytes of a group of packed activations: 32 numbers, a float32 and an int32.
PACKED_BYTES = GROUP + 8
LARGEST = 127
TINY = 1e-36  # below it, 127 / x is no number; a group so small counts as zeros
PREFETCH_BYTES = 2048  # one thread then reads 28 to 30 GB/s where a plain read reads 32; from 4096 on it was half

BYTES = ir.VectorType(I8, LANES)


def _emitted(emit: Callable[..., None]) -> Callable[..., Any]:
    """Make a numba signature's code generator of a function that emits into a builder for this machine."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        machine = Machine.of_host()
        emit(QuantisedEmitter(builder, fused=machine.fused, vnni=machine.vnni), args)
        return context.get_dummy_value()

    return codegen


class QuantisedEmitter(Emitter):
    """Emits what integers need; `vnni` where one instruction multiplies and adds four bytes a lane."""

    def __init__(self, builder: Any, *, fused: bool, vnni: bool) -> None:
        super().__init__(builder, fused=fused)
        self.vnni = vnni

    def splat_int(self, value: int) -> Value:
        """An int32 in every lane."""
        return ir.Constant(INTS, [value] * LANES)

    def spread_int(self, scalar: Value) -> Value:
        """A computed int32 in every lane."""
        first = self.builder.insert_element(ir.Constant(INTS, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))

    def reduce(self, operation: str, value: Value) -> Value:
        """The lanes of int32 brought down to one: `add` or `umax`, whose order makes no difference."""
        function = self._intrinsic(f"llvm.vector.reduce.{operation}.v16i32", I32, [INTS])
        return self.builder.call(function, [value])

    def dot_bytes(self, sums: Value, weights: Value, x: Value) -> Value:
        """Sums plus, in each lane, the four unsigned bytes of weights times the four signed ones of x."""
        if self.vnni:
            function = self._intrinsic("llvm.x86.avx512.vpdpbusd.512", INTS, [INTS] * 3)
            return self.builder.call(function, [sums, weights, x])
        b, eight = self.builder, ir.Constant(SHORTS, [8] * 2 * LANES)
        w, signed = b.bitcast(weights, SHORTS), b.bitcast(x, SHORTS)
        pairs = (
            (b.and_(w, ir.Constant(SHORTS, [255] * 2 * LANES)), b.ashr(b.shl(signed, eight), eight)),
            (b.lshr(w, eight), b.ashr(signed, eight)),
        )
        for both in pairs:  # numbers 0 and 2 of each four, then 1 and 3; LLVM knows this form for pmaddwd
            products = []
            for place in (0, 1):
                lanes = ir.Constant(INTS, list(range(place, 2 * LANES, 2)))
                wide = [b.sext(b.shuffle_vector(one, one, lanes), INTS) for one in both]
                products.append(b.mul(*wide))
            sums = b.add(sums, b.add(*products))
        return sums

    def scales(self, address: Value) -> Value:
        """Sixteen bfloat16 as float32."""
        return self.widen(self.load(HALF_SHORTS, address))


@intrinsic
def pack_row(typing: Any, x: Any, k: Any, offset: Any, out: Any, out_stride: Any) -> Any:
    """Pack a row x `[k]` float32, rounded to int8, in groups of 32 that lie out_stride bytes apart.

    A group is 32 int8, zeros behind k; a float32, the scale; an int32, the sum of its numbers times -offset. The scale
    is that of the largest number: that / 127. With NaN or infinity in the group it is one of them, as are the products.
    """
    signature = types.void(*[types.int64] * 5)

    def emit(e: QuantisedEmitter, args: Sequence[Value]) -> None:
        x, k, offset, out, out_stride = args
        whole = e.builder.and_(k, e.number(-GROUP))
        rest = e.builder.sub(k, whole)

        def pack(place: Value, masks: Sequence[Value | None]) -> None:
            group = e.builder.lshr(place, e.number(5))
            _pack_group(e, e.at(x, e.times(place, 4)), masks, offset, e.at(out, e.builder.mul(group, out_stride)))

        with cgutils.for_range_slice(e.builder, e.number(0), whole, e.number(GROUP)) as (place, _):
            pack(place, (None, None))
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            pack(whole, [e.lanes_below(e.builder.sub(rest, e.number(half))) for half in (0, LANES)])

    return signature, _emitted(emit)


def _pack_group(e: QuantisedEmitter, x: Value, masks: Sequence[Value | None], offset: Value, out: Value) -> None:
    """Round 32 numbers."""
    b = e.builder
    places = [e.at(x, e.number(4 * half)) for half in (0, LANES)]
    found = [e.load_some(FLOATS, at, mask) for at, mask in zip(places, masks, strict=True)]
    # As integers, sizes of float32 are in the same order, and infinity and NaN are above all.
    sizes = [b.and_(b.bitcast(one, INTS), e.splat_int(0x7FFFFFFF)) for one in found]
    largest = b.bitcast(e.reduce("umax", b.select(b.icmp_unsigned(">", *sizes), *sizes)), F32)
    zero = ir.Constant(F32, 0.0)
    inverse = b.fdiv(ir.Constant(F32, float(LARGEST)), largest)
    inverse = b.select(b.fcmp_ordered("<", largest, ir.Constant(F32, TINY)), zero, inverse)
    total = e.splat_int(0)
    for half, one in enumerate(found):
        # Adding 1.5 * 2^23 leaves the rounded number in the low bits, whatever else there is.
        bits = b.bitcast(b.fadd(b.fmul(one, e.spread(inverse)), e.splat(ROUND)), INTS)
        narrow = b.trunc(bits, BYTES)
        e.store(narrow, e.at(out, e.number(LANES * half)))
        total = b.add(total, b.sext(narrow, INTS))
    e.store(b.fmul(largest, ir.Constant(F32, 1 / LARGEST)), e.at(out, e.number(GROUP)))
    e.store(b.mul(e.reduce("add", total), b.neg(b.trunc(offset, I32))), e.at(out, e.number(GROUP + 4)))


@intrinsic(prefer_literal=True)
def panel_strip(typing: Any, num_x: Any, bits: Any, matrix: Any, rows: Any) -> Any:
    """Fill out `[num_x, count]` float32 with packed x times `count` rows of a matrix in panels, turned.

    num_x and bits are literals. `matrix` is (panels, bytes of a panel, first row, count), `rows` is (x, bytes from one
    group to the next, k, out, stride of out); a group of x has all rows, PACKED_BYTES apart.
    """
    size = (num_x.literal_value, bits.literal_value)
    signature = types.void(num_x, bits, types.UniTuple(types.int64, 4), types.UniTuple(types.int64, 5))

    def emit(e: QuantisedEmitter, args: Sequence[Value]) -> None:
        panels, panel_bytes, first, count = cgutils.unpack_tuple(e.builder, args[2])
        x, x_stride, k, out, out_stride = cgutils.unpack_tuple(e.builder, args[3])
        b, groups = e.builder, _groups(e, k)
        start = b.ashr(first, e.number(4))
        stop = b.ashr(e.at(first, count, e.number(PANEL_ROWS - 1)), e.number(4))
        with cgutils.for_range_slice(b, start, stop, e.number(1)) as (panel, _):
            sums = _sum_panel(e, size, e.at(panels, b.mul(panel, panel_bytes)), groups, (x, x_stride))
            column = b.sub(e.times(panel, PANEL_ROWS), first)
            _store_panel(e, sums, (column, count), (e.at(out, e.times(column, 4)), out_stride))

    return signature, _emitted(emit)


def bytes_of_group(bits: int) -> int:
    """Return the bytes of a group in a panel, the scales included."""
    return 2 * PANEL_ROWS + GROUP * PANEL_ROWS * bits // 8


def _groups(e: Emitter, k: Value) -> Value:
    """How many groups k numbers are in."""
    return e.builder.lshr(e.at(k, e.number(GROUP - 1)), e.number(5))


def _sum_panel(e: QuantisedEmitter, size: tuple[int, int], panel: Value, groups: Value, inputs: Any) -> list[Value]:
    """Multiply `size[0]` rows of packed x with the 16 rows of a panel."""
    (rows, bits), (x, x_stride) = size, inputs
    group_bytes = bytes_of_group(bits)
    sums = [cgutils.alloca_once_value(e.builder, e.splat(0.0)) for _ in range(rows)]
    with cgutils.for_range_slice(e.builder, e.number(0), groups, e.number(1)) as (group, _):
        base = e.at(x, e.builder.mul(group, x_stride))
        packed = [e.at(base, e.number(PACKED_BYTES * row)) for row in range(rows)]
        starts = [e.spread_int(e.load(I32, e.at(one, e.number(GROUP + 4)))) for one in packed]
        at = e.at(panel, e.times(group, group_bytes))
        exact = _sum_group(e, bits, e.at(at, e.number(2 * PANEL_ROWS)), packed, starts)
        scale = e.scales(at)
        for row, one in enumerate(packed):
            both = e.builder.fmul(scale, e.spread(e.load(F32, e.at(one, e.number(GROUP)))))
            value = e.builder.sitofp(exact[row], FLOATS)
            e.builder.store(e.multiply_add(value, both, e.builder.load(sums[row])), sums[row])
    return [e.builder.load(one) for one in sums]


def _sum_group(e: QuantisedEmitter, bits: int, at: Value, x: Sequence[Value], sums: list[Value]) -> list[Value]:
    """Add the products of a group to sums, in integers; at is the group's place in a panel, x each row's."""
    for line in range(GROUP * bits // 32):
        place = e.at(at, e.number(4 * LANES * line))
        e.prefetch(e.at(place, e.number(PREFETCH_BYTES)), near=2 if len(x) == 1 else 3)
        for number, weights in enumerate(_unsigned(e, bits, e.load(INTS, place))):
            offset = e.number(4 * (line * 8 // bits + number))
            spread = [e.spread_int(e.load(I32, e.at(row, offset))) for row in x]
            sums = [e.dot_bytes(one, weights, x4) for one, x4 in zip(sums, spread, strict=True)]
    return sums


def _unsigned(e: QuantisedEmitter, bits: int, line: Value) -> list[Value]:
    """The numbers of 64 bytes, a byte each: four of every row, or for int4 twice four."""
    if bits == 8:
        return [line]
    low = e.splat_int(0x0F0F0F0F)
    return [e.builder.and_(line, low), e.builder.and_(e.builder.lshr(line, e.splat_int(4)), low)]


def _store_panel(e: Emitter, sums: Sequence[Value], part: tuple[Value, Value], output: tuple[Value, Value]) -> None:
    """Write the lanes of each row whose columns, the first of which is part[0], are from 0 up to part[1]."""
    (column, count), (out, stride) = part, output
    b = e.builder
    whole = b.and_(
        b.icmp_signed(">=", column, e.number(0)), b.icmp_signed("<=", e.at(column, e.number(PANEL_ROWS)), count)
    )
    with b.if_else(whole) as (then, otherwise):
        with then:
            for row, one in enumerate(sums):
                e.store(one, e.at(out, e.times(stride, row)))
        with otherwise:
            below = e.lanes_below(b.sub(e.number(0), column))
            mask = b.and_(e.lanes_below(b.sub(count, column)), b.not_(below))
            for row, one in enumerate(sums):
                e.store_some(one, e.at(out, e.times(stride, row)), mask)
