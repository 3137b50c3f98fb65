"""The decoder's operations as pure functions over arrays. A function's `out`, where it has one, may be its `x`.

Shapes: `rows` any number of tokens, `dim` the width of whatever is treated, `heads`, `head_dim`. All arrays of a call
have one dtype, float32 or float64; angles and sinusoids are worked out in float64 whatever the model computes in.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import RotaryConfig

# OpenBLAS reads the weights 1.3 times faster for a few rows when they are its left operand; for one row it makes no
# difference, and for many the turned result costs more than it saves.
MAX_FEW_ROWS = 32


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


def rms_norm_forward(x: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * weight `[rows, dim]` (Zhang and Sennrich 2019)."""
    scale = _row_dot(x)  # [rows, 1]
    scale *= 1.0 / x.shape[1]
    scale += eps
    np.sqrt(scale, out=scale)
    out = np.divide(x, scale, out=out)
    out *= weight
    return out


def layer_norm_forward(x: Array, weight: Array, bias: Array | None, eps: float, out: Array | None = None) -> Array:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias `[rows, dim]` (Ba et al. 2016)."""
    mean = np.add.reduce(x, axis=1, keepdims=True)  # [rows, 1]
    mean *= 1.0 / x.shape[1]
    out = np.subtract(x, mean, out=out)
    scale = _row_dot(out)  # [rows, 1]
    scale *= 1.0 / x.shape[1]
    scale += eps
    np.sqrt(scale, out=scale)
    out /= scale
    out *= weight
    if bias is not None:
        out += bias
    return out


def _row_dot(x: Array) -> Array:
    """Return each row's sum of squares, `[rows, 1]`; a dot product a row, so rows do not depend on each other."""
    dots: Array = np.matmul(x[:, None, :], x[:, :, None])  # [rows, 1, 1]
    return dots[:, 0]


def rotary_frequencies(rotary: RotaryConfig, head_dim: int) -> NDArray[np.float64]:
    """Return the angle per position of each pair of dimensions, `[head_dim / 2] float64`."""
    frequencies = rotary.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    if rotary.kind == "llama3":
        return _llama3_frequencies(rotary, frequencies)
    return frequencies


def _llama3_frequencies(rotary: RotaryConfig, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slow pairs are stretched by the factor, fast ones left alone, those between blended (Llama 3.1)."""
    turns = rotary.original_context_length * frequencies / (2 * np.pi)  # turns within the original context
    smooth = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * frequencies / rotary.factor + smooth * frequencies


def rotary_table(
    frequencies: NDArray[np.float64], positions: NDArray[np.int64], dtype: DTypeLike
) -> tuple[Array, Array]:
    """Return cos `[rows, 1, 1, half]` and signed sin `[rows, 1, 2, half]` (minus for the first half) of positions."""
    angles = positions[:, None] * frequencies  # [rows, half]
    cos = np.cos(angles)[:, None, None, :].astype(dtype)
    sin = np.sin(angles)
    return cos, np.stack([-sin, sin], axis=1)[:, None].astype(dtype)


def rotary_forward(x: Array, cos: Array, signed_sin: Array, out: Array | None = None) -> Array:
    """Turn each pair (i, i + half) of x `[rows, heads, 2, half]` by its row's angle: (a cos - b sin, b cos + a sin)."""
    swapped = x[:, :, ::-1] * signed_sin  # [rows, heads, 2, half]
    out = np.multiply(x, cos, out=out)
    out += swapped
    return out


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


def silu_forward(x: Array, out: Array | None = None) -> Array:
    """Return x * sigmoid(x) (Elfwing et al. 2017)."""
    # exp(-x) would overflow far below 0; at the floor silu is 0 to within 1e-32 already.
    x = np.maximum(x, -80.0 if x.dtype == np.float32 else -700.0)
    denominator = np.negative(x)
    np.exp(denominator, out=denominator)
    denominator += 1.0
    result: Array = np.divide(x, denominator, out=out)
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
