"""A compiled twin of `treadle_plugin_api.drawing.draw`: a row is read once, and nothing as long as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from treadle_plugin_api.drawing import nothing_to_draw
from treadle_plugin_api.logits import Logits

from treadle_kernels.compiled import entry_point
from treadle_kernels.emit import EXP_RANGE, FLOATS, I32, INTS, LANES, Emitter, Value
from treadle_kernels.stored import address_of
from treadle_kernels.tiles import largest_of_row
from treadle_kernels.vectors import Place, each_vector, kernel

# What is summed at once before the token is looked for in there, and up to which size of the largest logit weights need
# no shift: as NumPy's draw has it, but said here, as the cache on disk knows compiled code by these sources alone.
BLOCK, PLAIN_LOGIT = 256, 30.0

F64 = ir.DoubleType()
HALF_DOUBLES = ir.VectorType(F64, LANES // 2)


def _weight(e: Emitter, place: Place, row: Value, shift: Value) -> Value:
    """The exponentials of 16 floats less a shift; what is too small for float32, or masked, is 0, and NaN is NaN."""
    shifted = e.builder.fsub(place.load(row), shift)
    counts = e.builder.fcmp_unordered(">", shifted, e.splat(EXP_RANGE[0]))
    return place.masked(e.builder.select(counts, e.exp(shifted), e.splat(0.0)), e.splat(0.0))


@intrinsic
def weigh(typing: Any, x: Any, count: Any, shift: Any, tops: Any) -> Any:
    """Return the sum of exp(x - shift) of x `[count]` float32, in float64; bring tops `[16]` up to the largest x."""
    signature = types.float64(types.int64, types.int64, types.float32, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> Value:
        x, count, shift, tops = args
        b, shifts = e.builder, e.spread(shift)
        sums = [cgutils.alloca_once_value(b, ir.Constant(HALF_DOUBLES, [0.0] * (LANES // 2))) for _ in range(2)]
        largest = cgutils.alloca_once_value(b, e.load(FLOATS, tops))

        def add(place: Place) -> None:
            top = b.load(largest)
            b.store(e.maximum(place.masked(place.load(x), top), top), largest)
            power = _weight(e, place, x, shifts)
            for half, variable in enumerate(sums):
                wide = b.fpext(e.lanes(power, half * LANES // 2, LANES // 2), HALF_DOUBLES)
                b.store(b.fadd(b.load(variable), wide), variable)

        each_vector(e, count, add)
        e.store(b.load(largest), tops)
        lanes = ir.Constant(INTS, list(range(LANES)))
        folded = e.total([b.shuffle_vector(*(b.load(variable) for variable in sums), lanes)])
        return b.extract_element(folded, ir.Constant(I32, 0))

    return signature, kernel(emit)


@intrinsic
def weights_of(typing: Any, x: Any, count: Any, shift: Any, out: Any) -> Any:
    """Fill out `[count]` float32 with the exp(x - shift) that `weigh` adds up."""
    signature = types.void(types.int64, types.int64, types.float32, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, count, shift, out = args
        shifts = e.spread(shift)
        each_vector(e, count, lambda place: place.store(_weight(e, place, x, shifts), out))

    return signature, kernel(emit)


@njit(nogil=True)
def _weigh_blocks(x, count, shift, sums, tops):
    """Fill sums with those of each BLOCK of x; return the largest x."""
    tops[:] = -np.inf
    for block in range(len(sums)):
        start = block * BLOCK
        sums[block] = weigh(x + 4 * start, min(BLOCK, count - start), shift, np.int64(tops.ctypes.data))
    return largest_of_row(np.int64(tops.ctypes.data), len(tops))


@entry_point
def draw_row(x, count, u):
    """Return what `draw` does for a row `[count]` at an address; -1 where there is nothing to draw from."""
    sums, tops, shift = np.empty((count + BLOCK - 1) // BLOCK), np.empty(LANES, np.float32), np.float32(0.0)
    largest = _weigh_blocks(x, count, shift, sums, tops)
    if abs(largest) > PLAIN_LOGIT:
        shift = largest
        _weigh_blocks(x, count, shift, sums, tops)
    total = 0.0
    for block in range(len(sums)):
        total += sums[block]
    if not total > 0.0:
        return -1, 0.0
    # Where rounding leaves none above the share, it is the last that adds to the sum.
    target, running, before, chosen = u * total, 0.0, 0.0, 0
    for block in range(len(sums)):
        if sums[block] > 0.0:
            chosen, before = block, running
            running += sums[block]
            if running > target:
                break
    start, size = chosen * BLOCK, min(BLOCK, count - chosen * BLOCK)
    weights, running, index = np.empty(BLOCK, np.float32), before, 0
    weights_of(x + 4 * start, size, shift, np.int64(weights.ctypes.data))
    for place in range(size):
        if weights[place] > 0.0:
            index, running = place, running + weights[place]
            if running > target:
                break
    return start + index, weights[index] / total


def draw(logits: Logits, u: float, empty: Callable[[], Logits]) -> tuple[int, float]:
    """Do what `treadle_plugin_api.drawing.draw` does: exponentials differ in their last bits, and `empty` stays."""
    row = np.ascontiguousarray(logits, np.float32)
    index, probability = draw_row(address_of(row), len(row), u)
    if index < 0:
        raise nothing_to_draw()
    return index, probability
