"""The vector kernels of training that treat a row of floats: each reads what it needs once and writes once.

Addresses are int64; rows lie close and need be aligned to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import FLOATS, Emitter, Value
from treadle_kernels.vectors import Place, each_vector, kernel, reduce


@intrinsic
def dot_row(typing: Any, x: Any, y: Any, count: Any) -> Any:
    """Return the sum of x * y, both `[count]`: 16 sums, one for each place in a vector, which are folded."""
    signature = types.float32(*[types.int64] * 3)

    def emit(e: Emitter, args: Sequence[Value]) -> Value:
        x, y, count = args
        return reduce(
            e, count, e.splat(0.0), e.builder.fadd, lambda place: e.builder.fmul(place.load(x), place.load(y))
        )

    return signature, kernel(emit)


@intrinsic
def weighted_dot_row(typing: Any, x: Any, y: Any, weight: Any, count: Any) -> Any:
    """Return the sum of x * y * weight, all `[count]`; summed like `dot_row`."""
    signature = types.float32(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> Value:
        x, y, weight, count = args

        def product(place: Place) -> Value:
            return e.builder.fmul(e.builder.fmul(place.load(x), place.load(y)), place.load(weight))

        return reduce(e, count, e.splat(0.0), e.builder.fadd, product)

    return signature, kernel(emit)


@intrinsic
def norm_row(typing: Any, x: Any, weight: Any, factor: Any, count: Any, out: Any) -> Any:
    """Fill out `[count]` with x * factor * weight."""
    signature = types.void(types.int64, types.int64, types.float32, types.int64, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, weight, factor, count, out = args
        factors = e.spread(factor)

        def apply(place: Place) -> None:
            place.store(e.builder.fmul(e.builder.fmul(place.load(x), factors), place.load(weight)), out)

        each_vector(e, count, apply)

    return signature, kernel(emit)


@intrinsic
def norm_slopes_row(
    typing: Any, x: Any, weight: Any, dy: Any, inverse: Any, pull: Any, count: Any, dx: Any, dweight: Any
) -> Any:  # fmt: skip
    """Fill dx `[count]` with dy * weight * inverse - x * pull, and add dy * x * inverse to dweight `[count]`."""
    signature = types.void(*[types.int64] * 3, types.float32, types.float32, *[types.int64] * 3)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, weight, dy, inverse, pull, count, dx, dweight = args
        inverses, pulls = e.spread(inverse), e.spread(pull)

        def apply(place: Place) -> None:
            xs, scaled = place.load(x), e.builder.fmul(place.load(dy), inverses)
            gained = e.multiply_add(scaled, xs, place.load(dweight))
            slope = e.builder.fsub(e.builder.fmul(scaled, place.load(weight)), e.builder.fmul(xs, pulls))
            place.store(slope, dx)
            place.store(gained, dweight)

        each_vector(e, count, apply)

    return signature, kernel(emit)


@intrinsic
def turn_row(typing: Any, x: Any, cos: Any, sin: Any, sign: Any, half: Any) -> Any:
    """Turn x `[2, half]` in place: (a cos - b sin, b cos + a sin), sin times sign."""
    signature = types.void(*[types.int64] * 3, types.float32, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, cos, sin, sign, half = args
        second, signs = e.at(x, e.times(half, 4)), e.spread(sign)

        def apply(place: Place) -> None:
            a, b, cosines = place.load(x), place.load(second), place.load(cos)
            sines = e.builder.fmul(place.load(sin), signs)
            place.store(e.builder.fsub(e.builder.fmul(a, cosines), e.builder.fmul(b, sines)), x)
            place.store(e.builder.fadd(e.builder.fmul(b, cosines), e.builder.fmul(a, sines)), second)

        each_vector(e, half, apply)

    return signature, kernel(emit)


def _sigmoid(e: Emitter, x: Value) -> Value:
    one = e.splat(1.0)
    return e.builder.fdiv(one, e.builder.fadd(e.exp(e.builder.fsub(e.splat(0.0), x)), one))


@intrinsic
def gate_row(typing: Any, gate: Any, up: Any, count: Any, out: Any) -> Any:
    """Fill out `[count]` with silu(gate) * up."""
    signature = types.void(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        gate, up, count, out = args

        def apply(place: Place) -> None:
            gates = place.load(gate)
            activated = e.builder.fmul(gates, _sigmoid(e, gates))
            place.store(e.builder.fmul(activated, place.load(up)), out)

        each_vector(e, count, apply)

    return signature, kernel(emit)


@intrinsic
def gate_slopes_row(typing: Any, gate: Any, up: Any, dhidden: Any, count: Any) -> Any:
    """Put in the place of gate and up `[count]` their gradients, given that of silu(gate) * up."""
    signature = types.void(*[types.int64] * 4)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        gate, up, dhidden, count = args

        def apply(place: Place) -> None:
            gates, ups, slopes = place.load(gate), place.load(up), place.load(dhidden)
            share = _sigmoid(e, gates)
            activated = e.builder.fmul(gates, share)
            slope = e.multiply_add(activated, e.builder.fsub(e.splat(1.0), share), share)
            place.store(e.builder.fmul(slopes, e.builder.fmul(ups, slope)), gate)
            place.store(e.builder.fmul(slopes, activated), up)

        each_vector(e, count, apply)

    return signature, kernel(emit)


@intrinsic
def scale_row(typing: Any, x: Any, count: Any, factor: Any, added: Any) -> Any:
    """Put x * factor + added in the place of x `[count]`."""
    signature = types.void(types.int64, types.int64, types.float32, types.float32)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        x, count, factor, added = args
        factors, addends = e.spread(factor), e.spread(added)
        each_vector(e, count, lambda place: place.store(e.multiply_add(place.load(x), factors, addends), x))

    return signature, kernel(emit)


@intrinsic
def score_slopes_row(typing: Any, weights: Any, slopes: Any, mean: Any, scale: Any, count: Any) -> Any:
    """Put weights * (slopes - mean) * scale in the place of slopes `[count]`."""
    signature = types.void(types.int64, types.int64, types.float32, types.float32, types.int64)

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        weights, slopes, mean, scale, count = args
        means, scales = e.spread(mean), e.spread(scale)

        def apply(place: Place) -> None:
            beyond = e.builder.fsub(place.load(slopes), means)
            place.store(e.builder.fmul(e.builder.fmul(place.load(weights), scales), beyond), slopes)

        each_vector(e, count, apply)

    return signature, kernel(emit)


@intrinsic
def adamw_row(typing: Any, arrays: Any, count: Any, constants: Any) -> Any:
    """Change a parameter and its two moments `[count]`, given its gradient.

    arrays: the addresses of parameter, gradient and moments. constants: what the parameter keeps, the moments' decays
    and their complements, the root of the second moment's correction, eps, and the rate.
    """
    signature = types.void(types.UniTuple(types.int64, 4), types.int64, types.UniTuple(types.float32, 8))

    def emit(e: Emitter, args: Sequence[Value]) -> None:
        parameter, gradient, first, second = cgutils.unpack_tuple(e.builder, args[0])
        kept, beta1, gain1, beta2, gain2, root, eps, rate = map(e.spread, cgutils.unpack_tuple(e.builder, args[2]))
        fmul, fadd = e.builder.fmul, e.builder.fadd

        def apply(place: Place) -> None:
            slope = place.load(gradient)
            moment = fadd(fmul(place.load(first), beta1), fmul(slope, gain1))
            square = fadd(fmul(place.load(second), beta2), fmul(fmul(slope, slope), gain2))
            below = fadd(e.builder.fdiv(_root(e, square), root), eps)
            change = fmul(e.builder.fdiv(moment, below), rate)
            place.store(e.builder.fsub(fmul(place.load(parameter), kept), change), parameter)
            place.store(moment, first)
            place.store(square, second)

        each_vector(e, args[1], apply)

    return signature, kernel(emit)


def _root(e: Emitter, x: Value) -> Value:
    kind = ir.FunctionType(FLOATS, [FLOATS])
    return e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, "llvm.sqrt.v16f32"), [x])
