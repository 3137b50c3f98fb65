"""Products with bfloat16 on tiles (AMX), each an intrinsic that emits its own LLVM code; see `tiles` for the others.

A tile is 16 rows of 64 bytes. One of weights, 32 numbers of 16 rows, is read where it lies; one of x, as many, is
packed before: its rows are pairs of numbers. Their product is 16 rows of weights by 16 rows of x, turned at last.

An element's sum has one order, whichever rows it stands beside: 32 numbers at a time, ascending, as the CPU adds them;
of each 32 first those of x's first term, then those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import FLOATS, I8, I64, INTS, LANES, SHORTS, Emitter, Value
from treadle_kernels.tiles import LINE
from treadle_kernels.vectors import kernel

TILE_ROWS, TILE_BYTES = 16, 1024
STEP = 32  # numbers of a row in a tile

# A float32 has 24 digits and a bfloat16 8: it is the sum of three, exactly, and only one of them where it is rounded.
TERMS = MappingProxyType({"bfloat16": 3, "bfloat16_rounded": 1})

# The eight tiles: sums of up to four tiles of weights in the first ones, x's terms in the last ones, from the end.
# What weights are read into takes turns where several are left, so that the next can be read meanwhile.
STRIP_TILES, LAST_TILE = 4, 7
PALETTE = 1
# Where the first tile's bytes of a row, and its number of rows, stand in what the CPU reads its configuration from.
COLUMNS_AT, ROWS_AT, CONFIG_BYTES = 16, 48, 64


@intrinsic
def begin_tiles(typing: Any) -> Any:
    """Make this thread's tiles 16 rows of 64 bytes each."""
    config = bytearray(CONFIG_BYTES)
    config[0] = PALETTE
    for tile in range(LAST_TILE + 1):
        config[COLUMNS_AT + 2 * tile], config[ROWS_AT + tile] = LINE, TILE_ROWS

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        constant = ir.Constant(ir.ArrayType(I8, CONFIG_BYTES), config)
        e.configure_tiles(e.builder.ptrtoint(cgutils.global_constant(e.builder, "tiles", constant), I64))

    return types.void(), kernel(emit)


@intrinsic
def end_tiles(typing: Any) -> Any:
    """Give this thread's tiles back."""
    return types.void(), kernel(lambda e, args: e.release_tiles())


@intrinsic(prefer_literal=True)
def pack_group(typing: Any, form: Any, x: Any, stride: Any, num_x: Any, k: Any, out: Any) -> Any:
    """Write 1 to 16 rows of x `[num_x, k]` float32 as tiles, of each 32 numbers one for each term, behind each other.

    A tile is `[16 pairs, 16 rows of x, 2]` bfloat16, with zeros for numbers and rows that are not there.
    """
    signature = types.void(form, *[types.int64] * 5)
    num_terms = TERMS[form.literal_value]

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, stride, num_x, k, out = args[1:]
        with cgutils.for_range_slice(e.builder, e.number(0), k, e.number(STEP)) as (position, _):
            left = e.builder.sub(k, position)
            masks = [e.lanes_below(left), e.lanes_below(e.at(left, e.number(-LANES)))]
            tiles = e.at(out, e.times(position, num_terms * TILE_BYTES // STEP))
            with cgutils.for_range(e.builder, num_x) as loop:
                source = e.at(x, e.builder.mul(loop.index, stride), e.times(position, 4))
                _store_terms(e, num_terms, source, masks, e.at(tiles, e.times(loop.index, LINE)))
            with e.builder.if_else(e.builder.icmp_signed("==", num_x, e.number(1))) as (alone, beside):
                with alone:
                    _turn_tiles(e, num_terms, tiles, 1)
                with beside:
                    _clear_rows(e, num_terms, tiles, num_x)
                    _turn_tiles(e, num_terms, tiles, TILE_ROWS)

    return signature, kernel(emit)


def _store_terms(e: Emitter, num_terms: int, source: Value, masks: Sequence[Value], out: Value) -> None:
    """Write 32 numbers of a row as 16 pairs, once for each term, a tile apart."""
    found = [e.load_some(FLOATS, e.at(source, e.number(part * LINE)), mask) for part, mask in enumerate(masks)]
    even, odd = e.pair(*found)
    for term in range(num_terms):
        if num_terms == 1:
            words = e.join(e.round(even), e.round(odd))
        else:
            (first, even), (second, odd) = e.split(even), e.split(odd)
            words = e.join(first, second)
        e.store(words, e.at(out, e.number(term * TILE_BYTES)))


def _clear_rows(e: Emitter, num_terms: int, tiles: Value, first: Value) -> None:
    """Write zeros to the rows of each term's tile from `first` on."""
    with cgutils.for_range_slice(e.builder, first, e.number(TILE_ROWS), e.number(1)) as (row, _):
        for term in range(num_terms):
            zero = ir.Constant(INTS, [0] * LANES)
            e.store(zero, e.at(tiles, e.times(row, LINE), e.number(term * TILE_BYTES)))


def _turn_tiles(e: Emitter, num_terms: int, tiles: Value, num_rows: int) -> None:
    """Turn each term's tile of 16 by 16 words where it lies; rows behind `num_rows` are zeros, not what lies there."""
    for term in range(num_terms):
        ats = [e.at(tiles, e.number(term * TILE_BYTES + row * LINE)) for row in range(TILE_ROWS)]
        zeros = [ir.Constant(INTS, [0] * LANES)] * (TILE_ROWS - num_rows)
        for at, turned in zip(ats, e.transpose([*(e.load(INTS, at) for at in ats[:num_rows]), *zeros]), strict=True):
            e.store(turned, at)


@intrinsic(prefer_literal=True)
def tile_strip(typing: Any, form: Any, matrix: Any, rows: Any) -> Any:
    """Fill out `[num_x, count]` float32 with a group of rows of x times rows of weights `[count, k]` bfloat16, turned.

    `matrix` is (weights, stride, count, fetched, pace): memory is fetched from the address `fetched` on, so many bytes,
    of whole lines, for each tile of weights. `rows` is (x, num_x, k, out, stride of out), x as `pack_group` leaves it.
    """
    tuples = (types.UniTuple(types.int64, 5), types.UniTuple(types.int64, 5))
    num_terms = TERMS[form.literal_value]

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weights, stride, count, fetched, pace = cgutils.unpack_tuple(e.builder, args[1])
        x, num_x, k, out, out_stride = cgutils.unpack_tuple(e.builder, args[2])
        part, made = _room(e, 1), _room(e, STRIP_TILES)
        tiles = e.builder.ashr(count, e.number(4))
        start, steps = e.number(0), e.builder.ashr(k, e.number(5))
        for size in (4, 2, 1):
            stop = e.builder.and_(tiles, e.number(-size))
            with cgutils.for_range_slice(e.builder, start, stop, e.number(size)) as (tile, _):
                row = e.times(tile, TILE_ROWS)
                line = e.at(fetched, e.builder.mul(e.builder.mul(tile, steps), pace))
                source = e.at(weights, e.builder.mul(row, stride))
                strip = _Strip(e, num_terms, size, None, source, stride, x, k, part)
                strip.add_products((line, pace))
                strip.store_turned(made, num_x, e.at(out, e.times(row, 4)), out_stride)
            start = stop
        rest, row = e.builder.and_(count, e.number(TILE_ROWS - 1)), e.times(tiles, TILE_ROWS)
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            source = e.at(weights, e.builder.mul(row, stride))
            strip = _Strip(e, num_terms, 1, rest, source, stride, x, k, part)
            strip.add_products(None)
            strip.store_turned(made, num_x, e.at(out, e.times(row, 4)), out_stride)

    return types.void(form, *tuples), kernel(emit)


def _room(e: Emitter, num_tiles: int) -> Value:
    """Return the address of room for some tiles, each line of it one of memory."""
    with e.builder.goto_entry_block():  # not `cgutils.alloca_once`, which fills it with zeros
        room = e.builder.alloca(ir.ArrayType(I8, num_tiles * TILE_BYTES))
    room.align = LINE
    return e.builder.ptrtoint(room, I64)


@dataclass(frozen=True, slots=True)
class _Strip:
    """A group of rows of x, up to 16, beside some tiles of weights, up to 4, whose sums stay in tiles.

    Attributes:
        num_rows: how many rows of weights the only tile has; None where all of 16 are there.
        weights: address of the first row.
        part: of room for a tile of weights of which not all is there.
    """

    e: Emitter
    num_terms: int
    num_tiles: int
    num_rows: Value | None
    weights: Value
    stride: Value
    x: Value
    k: Value
    part: Value

    def add_products(self, fetched: tuple[Value, Value] | None) -> None:
        """Sum over all of k; fetched is an address and a pace for each tile, or None."""
        e = self.e
        for tile in range(self.num_tiles):
            e.clear_tile(tile)
        if self.num_rows is not None:
            for row in range(TILE_ROWS):  # those that are there come over them
                e.store(ir.Constant(INTS, [0] * LANES), e.at(self.part, e.number(row * LINE)))
        steps = e.builder.ashr(self.k, e.number(5))
        with cgutils.for_range(e.builder, steps) as loop:
            if fetched is not None:
                self._fetch(loop.index, *fetched)
            self._add_step(loop.index, e.number(STEP), whole=self.num_rows is None)
        rest = e.builder.and_(self.k, e.number(STEP - 1))
        with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
            self._add_step(steps, rest, whole=False)

    def _fetch(self, step: Value, fetched: Value, pace: Value) -> None:
        """Fetch a step's share in the order of addresses, though the tiles read 16 to 64 streams of memory."""
        e, size = self.e, self.num_tiles
        first = e.at(fetched, e.builder.mul(step, e.times(pace, size)))
        with cgutils.for_range_slice(e.builder, e.number(0), pace, e.number(LINE)) as (offset, _):
            for line in range(size):
                e.prefetch(e.at(first, e.times(offset, size), e.number(line * LINE)))

    def _add_step(self, step: Value, width: Value, *, whole: bool) -> None:
        """Add 32 numbers of each row, or as many as `width`, to the sums."""
        e, x = self.e, self.e.at(self.x, self.e.times(step, self.num_terms * TILE_BYTES))
        for term in range(self.num_terms):
            e.load_tile(LAST_TILE - term, e.at(x, e.number(term * TILE_BYTES)), e.number(LINE))
        for tile in range(self.num_tiles):
            left = STRIP_TILES + tile % (STRIP_TILES - self.num_terms)
            at = e.at(self.weights, e.times(self.stride, tile * TILE_ROWS), e.times(step, LINE))
            if whole:
                e.load_tile(left, at, self.stride)
            else:
                self._copy_part(at, width)
                e.load_tile(left, self.part, e.number(LINE))
            for term in range(self.num_terms):
                e.multiply_tiles(tile, left, LAST_TILE - term)

    def _copy_part(self, weights: Value, width: Value) -> None:
        """Copy what is there of a tile of weights, and nothing behind it, to its room."""
        e, mask = self.e, self.e.lanes_below(width, STEP)
        num_rows = e.number(TILE_ROWS) if self.num_rows is None else self.num_rows
        with cgutils.for_range(e.builder, num_rows) as loop:
            found = e.load_some(SHORTS, e.at(weights, e.builder.mul(loop.index, self.stride)), mask)
            e.store(found, e.at(self.part, e.times(loop.index, LINE)))

    def store_turned(self, made: Value, num_x: Value, out: Value, out_stride: Value) -> None:
        """Write the sums turned, a row for each of x; made is room for the tiles."""
        e, tiles = self.e, range(self.num_tiles)
        for tile in tiles:
            e.store_tile(tile, e.at(made, e.number(tile * TILE_BYTES)), e.number(LINE))
        for tile in tiles:
            ats = [e.at(made, e.number(tile * TILE_BYTES + row * LINE)) for row in range(TILE_ROWS)]
            for at, turned in zip(ats, e.transpose([e.load(FLOATS, at) for at in ats]), strict=True):
                e.store(turned, at)
        mask = None if self.num_rows is None else e.lanes_below(self.num_rows)
        with cgutils.for_range(e.builder, num_x) as loop:
            source, target = e.at(made, e.times(loop.index, LINE)), e.at(out, e.builder.mul(loop.index, out_stride))
            for tile in tiles:
                found = e.load(FLOATS, e.at(source, e.number(tile * TILE_BYTES)))
                e.store_some(found, e.at(target, e.number(tile * LINE)), mask)
