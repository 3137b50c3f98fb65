"""Pieces of LLVM code that the kernels are put together from: vectors of 16 lanes, whatever the CPU's registers hold.

LLVM lowers a vector of 16 floats to one register with AVX-512, to two with AVX2, to four with NEON or SSE. Nothing here
is marked as free to reorder, so that the bits of a sum are those of the order written down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)

SHORTS, HALF_SHORTS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I16, LANES)

# exp(r) for |r| <= ln(2) / 2: 1 + r + r^2 times this polynomial, highest power first (Cephes' expf).
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_RANGE = (-87.33, 88.37)  # beyond, the result is no normal float32
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
ROUND = 12582912.0  # 1.5 * 2^23: adding and taking it off again rounds to the nearest integer

Value = Any


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Emitter:
    """Emits into one function; `fused` and `pairs` as the machine has it."""

    def __init__(self, builder: Any, *, fused: bool, pairs: bool = False) -> None:
        self.builder = builder
        self.fused = fused
        self.pairs = pairs

    def number(self, value: int) -> Value:
        """An int64."""
        return ir.Constant(I64, value)

    def splat(self, value: float) -> Value:
        """A float32 in every lane."""
        return ir.Constant(FLOATS, [value] * LANES)

    def spread(self, scalar: Value) -> Value:
        """A computed float32 in every lane."""
        first = self.builder.insert_element(ir.Constant(FLOATS, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))

    def at(self, base: Value, *offsets: Value) -> Value:
        """The address that so many bytes after base has."""
        for offset in offsets:
            base = self.builder.add(base, offset)
        return base

    def times(self, value: Value, factor: int) -> Value:
        """An int64 times a constant."""
        return self.builder.mul(value, self.number(factor))

    def load(self, kind: Any, address: Value) -> Value:
        """Read a scalar or a vector from an address that need be aligned to nothing."""
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Value, address: Value) -> None:
        """Write a scalar or a vector."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 1

    def lanes_below(self, count: Value, lanes: int = LANES) -> Value:
        """The mask of the lanes whose number is below an int64."""
        kind, narrow = ir.VectorType(I32, lanes), self.builder.trunc(count, I32)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), narrow, ir.Constant(I32, 0))
        every = self.builder.shuffle_vector(first, first, ir.Constant(kind, [0] * lanes))
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), every)

    def load_some(self, kind: Any, address: Value, mask: Value | None) -> Value:
        """Read the lanes of a mask and nothing else of memory, the others are 0; without one all."""
        if mask is None:
            return self.load(kind, address)
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        zero = ir.Constant(kind, [0] * kind.count)
        name = f"llvm.masked.load.{_name(kind)}.p0"
        function = self._intrinsic(name, kind, [pointer.type, I32, mask.type, kind])
        return self.builder.call(function, [pointer, ir.Constant(I32, 1), mask, zero])

    def store_some(self, value: Value, address: Value, mask: Value | None) -> None:
        """Write the lanes of a mask and nothing else; without one all."""
        if mask is None:
            self.store(value, address)
            return
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        arguments = [value.type, pointer.type, I32, MASK]
        function = self._intrinsic(f"llvm.masked.store.{_name(value.type)}.p0", ir.VoidType(), arguments)
        self.builder.call(function, [value, pointer, ir.Constant(I32, 1), mask])

    def prefetch(self, address: Value, near: int = 2) -> None:
        """Have a line of memory brought to the second-level cache, or with near = 3 to the first.

        The first level waits for too few lines at once to read memory at its speed. An address that is nobody's does no
        harm.
        """
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        function = self._intrinsic("llvm.prefetch.p0", ir.VoidType(), [pointer.type, I32, I32, I32])
        self.builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (0, near, 1))])

    def barrier(self) -> None:
        """Have what comes later read memory again: it then needs no register until it does."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.builder.asm(kind, "", "~{memory}", [], side_effect=True)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        """A * b + c."""
        if not self.fused:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        return self.builder.call(self._intrinsic("llvm.fma.v16f32", FLOATS, [FLOATS] * 3), [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of each two lanes."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def widen(self, value: Value) -> Value:
        """16 bfloat16 as float32."""
        wide = self.builder.zext(value, INTS)
        return self.builder.bitcast(self.builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)

    def widen_pairs(self, value: Value) -> tuple[Value, Value]:
        """32 bfloat16 as float32: those at even places, and those at odd ones."""
        words = self.builder.bitcast(value, INTS)
        even = self.builder.shl(words, ir.Constant(INTS, [16] * LANES))
        odd = self.builder.and_(words, ir.Constant(INTS, [-(1 << 16)] * LANES))
        return self.builder.bitcast(even, FLOATS), self.builder.bitcast(odd, FLOATS)

    def pair(self, first: Value, second: Value) -> tuple[Value, Value]:
        """Of 32 lanes in two vectors those at even places, and those at odd ones."""
        even, odd = (_lanes(range(start, 2 * LANES, 2)) for start in (0, 1))
        return self.builder.shuffle_vector(first, second, even), self.builder.shuffle_vector(first, second, odd)

    def round(self, value: Value) -> Value:
        """16 float32 rounded to bfloat16, to the nearest, of two to the even one; NaN stays NaN. `<16 x i16>`."""
        b, bits = self.builder, self.builder.bitcast(value, INTS)

        def every(number: int) -> Value:
            return ir.Constant(INTS, [number] * LANES)

        last = b.and_(b.lshr(bits, every(16)), every(1))
        rounded = b.add(b.add(bits, every(0x7FFF)), last)
        quiet = b.or_(bits, every(1 << 22))
        chosen = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        return b.trunc(b.lshr(chosen, every(16)), HALF_SHORTS)

    def add_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """C plus in each lane two products of bfloat16, of the even and the odd place; a and b `<32 x i16>`."""
        if not self.pairs:
            for one, other in zip(self.widen_pairs(a), self.widen_pairs(b), strict=True):
                c = self.multiply_add(one, other, c)
            return c
        kind = ir.VectorType(_BFloat(), 2 * LANES)
        function = self._intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, kind, kind])
        return self.builder.call(function, [c, self.builder.bitcast(a, kind), self.builder.bitcast(b, kind)])

    def split(self, value: Value) -> tuple[Value, Value]:
        """16 float32 as bfloat16, cut off behind their eight digits, `<16 x i16>`, and what was cut off, as float32.

        Both are exact. Nothing is cut off from what is infinite; from NaN NaN is.
        """
        b, bits = self.builder, self.builder.bitcast(value, INTS)
        high = b.bitcast(b.and_(bits, ir.Constant(INTS, [-(1 << 16)] * LANES)), FLOATS)
        rest = b.select(b.fcmp_ordered("==", value, high), self.splat(0.0), b.fsub(value, high))
        return b.trunc(b.lshr(bits, ir.Constant(INTS, [16] * LANES)), HALF_SHORTS), rest

    def join(self, even: Value, odd: Value) -> Value:
        """Twice 16 shorts in turn, two to a word; `<16 x i32>`."""
        high = self.builder.shl(self.builder.zext(odd, INTS), ir.Constant(INTS, [16] * LANES))
        return self.builder.or_(self.builder.zext(even, INTS), high)

    def configure_tiles(self, config: Value) -> None:
        """Take the shapes of tiles from the 64 bytes at an address; all tiles are zeros."""
        self._tile_instruction("ldtilecfg", [], config)

    def release_tiles(self) -> None:
        """Give the tiles back: a thread that holds them is dearer to stop and to start."""
        self._tile_instruction("tilerelease", [])

    def clear_tile(self, tile: int) -> None:
        """Fill a tile with zeros."""
        self._tile_instruction("tilezero", [tile])

    def load_tile(self, tile: int, address: Value, stride: Value) -> None:
        """Read a tile's rows, which lie so many bytes apart."""
        self._tile_instruction("tileloadd64", [tile], address, stride)

    def store_tile(self, tile: int, address: Value, stride: Value) -> None:
        """Write a tile's rows."""
        self._tile_instruction("tilestored64", [tile], address, stride)

    def multiply_tiles(self, into: int, left: int, right: int) -> None:
        """Add products of bfloat16: row i, column j gets row i of the left times column j of pairs of the right."""
        self._tile_instruction("tdpbf16ps", [into, left, right])

    def _tile_instruction(self, name: str, tiles: Sequence[int], address: Value = None, *rest: Value) -> None:
        values = [ir.Constant(I8, tile) for tile in tiles]
        if address is not None:
            values += [self.builder.inttoptr(address, I8.as_pointer()), *rest]
        kinds = [value.type for value in values]
        self.builder.call(self._intrinsic(f"llvm.x86.{name}", ir.VoidType(), kinds), values)

    def exp(self, x: Value) -> Value:
        """E to the power of each lane, within two units in the last place; held at the ends of float32's range.

        NaN stays NaN: what is not finite must be seen in the end.
        """
        low, high = map(self.splat, EXP_RANGE)
        x = self.builder.select(self.builder.fcmp_unordered(">", x, low), x, low)
        x = self.builder.select(self.builder.fcmp_unordered("<", x, high), x, high)
        shifted = self.multiply_add(x, self.splat(1 / math.log(2)), self.splat(ROUND))
        twos = self.builder.fsub(shifted, self.splat(ROUND))
        rest = self.multiply_add(twos, self.splat(-LN2_HIGH), x)
        rest = self.multiply_add(twos, self.splat(-LN2_LOW), rest)
        series = self.splat(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            series = self.multiply_add(series, rest, self.splat(coefficient))
        series = self.multiply_add(series, self.builder.fmul(rest, rest), rest)
        series = self.builder.fadd(series, self.splat(1.0))
        whole = self.builder.select(self.builder.fcmp_ordered("ord", twos, twos), twos, self.splat(0.0))
        exponent = self.builder.add(self.builder.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        power = self.builder.bitcast(self.builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS)
        return self.builder.fmul(series, power)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """16 vectors of 16 lanes, turned: lane i of vector j becomes lane j of vector i (Eklundh 1972)."""
        turned, width = list(rows), 1
        while width < LANES:
            # Of two vectors `width` apart, odd runs of lanes of the first change places with even ones of the other.
            lanes = range(LANES)
            kept = [lane if not lane & width else lane - width + LANES for lane in lanes]
            taken = [lane + width if not lane & width else lane + LANES for lane in lanes]
            pairs = [(i, i + width) for i in range(LANES) if not i & width]
            for i, j in pairs:
                a, b = turned[i], turned[j]
                turned[i] = self.builder.shuffle_vector(a, b, _lanes(kept))
                turned[j] = self.builder.shuffle_vector(a, b, _lanes(taken))
            width *= 2
        return turned

    def fold(self, vectors: Sequence[Value], combine: Any) -> Value:
        """Bring each vector's lanes down to one, by halves: i with i + 8, then + 4, + 2, + 1; `[len(vectors)]`.

        Two vectors share the work of one wherever they can; which lanes meet does not depend on it. The number of
        vectors is a power of two.
        """
        width = LANES
        while width > 1:
            width //= 2
            if len(vectors) > 1:
                pairs = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [combine(*self._halves(a, b, width)) for a, b in pairs]
            else:
                vectors = [combine(*self._halves(vectors[0], None, width))]
        return vectors[0]

    def lanes(self, value: Value, start: int, count: int) -> Value:
        """Some lanes of a vector, one after the other."""
        return self.builder.shuffle_vector(value, value, _lanes(range(start, start + count)))

    def total(self, vectors: Sequence[Value]) -> Value:
        """The sums of the lanes of each vector."""
        return self.fold(vectors, self.builder.fadd)

    def _halves(self, a: Value, b: Value | None, width: int) -> tuple[Value, Value]:
        """The first and the second halves of every run of 2 * width lanes of a, and then of b."""
        count = a.type.count
        starts = range(0, count if b is None else 2 * count, 2 * width)
        halves = ([start + half + lane for start in starts for lane in range(width)] for half in (0, width))
        other = a if b is None else b
        shuffled = (self.builder.shuffle_vector(a, other, _lanes(places)) for places in halves)
        first, second = shuffled
        return first, second

    def _intrinsic(self, name: str, returns: Any, arguments: Sequence[Any]) -> Any:
        kind = ir.FunctionType(returns, arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, name)


def _name(kind: Any) -> str:
    """Return what LLVM calls a vector in the names of its functions."""
    return f"v{kind.count}" + {F32: "f32", I32: "i32", I16: "i16", I8: "i8"}[kind.element]


def _lanes(places: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, len(places)), list(places))
