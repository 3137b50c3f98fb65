"""The decoder's operations as pure functions over arrays. A function's `out`, where it has one, may be its `x`.

Shapes: `rows` any number of tokens, `dim` the width of whatever is treated, `heads`, `head_dim`. All arrays of a call
have one dtype, float32 or float64; sinusoids are worked out in float64 whatever the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array

# OpenBLAS reads the weights 1.3 times faster for a few rows when they are its left operand; for one row it makes no
# difference, and for many the turned result costs more than it saves.
MAX_FEW_ROWS = 32

# Numbers that elementwise passes treat at once: a piece and what is made of it stay in the second-level cache.
PIECE = 1 << 15

# erf(x) = x P(x^2) / Q(x^2) between -4 and 4, where float32 has no more room below 1: a rational fit, least squares
# reweighted towards the largest error, which is 1.5e-9 before rounding.
ERF_LIMIT = 4.0
ERF_NUMERATOR = (
    1.1283791821085323,
    0.18471040957940835,
    0.0543326187642997,
    0.0038395333335905493,
    0.0003826929073381157,
    4.7805560805087334e-06,
    -1.366687273993648e-08,
)
ERF_DENOMINATOR = (
    1.0,
    0.4970288838936672,
    0.11382634607391595,
    0.015453526855290075,
    0.0013095807907302027,
    6.400942752893453e-05,
)


def row_pieces(x: Array) -> Iterator[slice]:
    """Yield all rows of x `[rows, ...]`, about PIECE numbers at a time."""
    num_rows = max(1, PIECE * len(x) // max(1, x.size))
    for start in range(0, len(x), num_rows):
        yield slice(start, start + num_rows)


def linear_forward(x: Array, weight: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """Return x @ weight.T + bias `[rows, out]` of x `[rows, in]`, weight `[out, in]`, bias `[out]`."""
    if 1 < len(x) <= MAX_FEW_ROWS:
        product = np.matmul(weight, x.T).T
        out = product if out is None else _copy(product, out)
    else:
        out = np.matmul(x, weight.T, out=out)
    if bias is not None:
        out += bias
    return out


def _copy(source: Array, out: Array) -> Array:
    out[...] = source
    return out


def rms_norm_forward(x: Array, weight: Array | None, eps: float, out: Array | None = None) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * weight `[..., dim]` (Zhang and Sennrich 2019)."""
    scale = _row_dot(x)  # [..., 1]
    scale *= 1.0 / x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    out = np.divide(x, scale, out=out)
    if weight is not None:
        out *= weight
    return out


def layer_norm_forward(
    x: Array, weight: Array | None, bias: Array | None, eps: float, out: Array | None = None
) -> Array:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias `[..., dim]` (Ba et al. 2016)."""
    mean = np.add.reduce(x, axis=-1, keepdims=True)  # [..., 1]
    mean *= 1.0 / x.shape[-1]
    out = np.subtract(x, mean, out=out)
    scale = _row_dot(out)  # [..., 1]
    scale *= 1.0 / x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    out /= scale
    if weight is not None:
        out *= weight
    if bias is not None:
        out += bias
    return out


def _row_dot(x: Array) -> Array:
    """Return each row's sum of squares, `[..., 1]`; a dot product a row, so rows do not depend on each other."""
    dots: Array = np.matmul(x[..., None, :], x[..., :, None])  # [..., 1, 1]
    return dots[..., 0]


def sinusoidal_positions(positions: NDArray[np.int64], dim: int, dtype: DTypeLike) -> Array:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i/dim)), PE(pos, 2i+1) = cos of the same, `[rows, dim]` (Vaswani 2017)."""
    pairs = np.arange(0, dim, 2, dtype=np.float64)
    angles = positions[:, None] / 10000.0 ** (pairs / dim)  # [rows, ceil(dim / 2)]
    table = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(positions), -1)  # [rows, dim or dim + 1]
    return table[:, :dim].astype(dtype)


def softmax_forward(x: Array, out: Array | None = None) -> Array:
    """Return exp(x - max) / sum along the last axis; a row with one finite entry at least has no NaN."""
    out = np.subtract(x, np.maximum.reduce(x, axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= np.add.reduce(out, axis=-1, keepdims=True)
    return out


def softcap_forward(x: Array, cap: float, out: Array | None = None) -> Array:
    """Return cap * tanh(x / cap): nearly x near 0, never past the cap (Gemma 2)."""
    out = np.multiply(x, 1.0 / cap, out=out)
    np.tanh(out, out=out)
    out *= cap
    return out


def sigmoid_forward(x: Array, out: Array | None = None) -> Array:
    """Return 1 / (1 + exp(-x))."""
    denominator = _exp_minus(x)
    denominator += 1.0
    result: Array = np.divide(1.0, denominator, out=out)
    return result


def _exp_minus(x: Array) -> Array:
    """Return exp(-x), far below 0 that of a floor: it would overflow, and what divides by it is 0 to within 1e-34."""
    return np.exp(-np.maximum(x, -80.0 if x.dtype == np.float32 else -700.0))


def silu_forward(x: Array, out: Array | None = None) -> Array:
    """Return x * sigmoid(x) (Elfwing et al. 2017)."""
    # exp(-x) would overflow far below 0; at the floor silu is 0 to within 1e-32 already.
    x = np.maximum(x, -80.0 if x.dtype == np.float32 else -700.0)
    denominator = np.negative(x)
    np.exp(denominator, out=denominator)
    denominator += 1.0
    result: Array = np.divide(x, denominator, out=out)
    return result


def gelu_forward(x: Array, out: Array | None = None) -> Array:
    """Return x * Phi(x), Phi the standard normal distribution function (Hendrycks and Gimpel 2016)."""
    phi = erf_forward(x * math.sqrt(0.5))
    phi += 1.0
    phi *= 0.5
    result: Array = np.multiply(x, phi, out=out)
    return result


def erf_forward(x: Array) -> Array:
    """Return the error function: within 4e-7 in float32, to the last bits, and slowly, in float64."""
    if x.dtype != np.float32:
        return np.array([math.erf(value) for value in x.flat], x.dtype).reshape(x.shape)
    x = np.clip(x, -ERF_LIMIT, ERF_LIMIT)
    square = x * x
    result = _polynomial(ERF_NUMERATOR, square)
    result *= x
    result /= _polynomial(ERF_DENOMINATOR, square)
    return result


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Return the sum of coefficients[i] * x^i by Horner's rule."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += coefficient
    return result


def gelu_quick_forward(x: Array, out: Array | None = None) -> Array:
    """Return x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    gate = sigmoid_forward(x * 1.702)
    result: Array = np.multiply(x, gate, out=out)
    return result


def gelu_tanh_forward(x: Array, out: Array | None = None) -> Array:
    """Return 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    inner = x * x
    inner *= 0.044715
    inner += 1.0
    inner *= x
    inner *= math.sqrt(2 / math.pi)
    np.tanh(inner, out=inner)
    inner += 1.0
    inner *= 0.5
    result: Array = np.multiply(x, inner, out=out)
    return result


def relu_forward(x: Array, out: Array | None = None) -> Array:
    """Return max(x, 0)."""
    result: Array = np.maximum(x, 0.0, out=out)
    return result


def relu_squared_forward(x: Array, out: Array | None = None) -> Array:
    """Return max(x, 0)^2 (So et al. 2021)."""
    out = np.maximum(x, 0.0, out=out)
    out *= out
    return out
