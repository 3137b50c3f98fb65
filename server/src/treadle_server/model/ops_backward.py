"""The backward halves of `ops.py`: gradients of its functions, given those of their results.

Shapes and dtypes as there. `dy` is the gradient of what the forward half returned, and has its shape; whatever the
forward half can work out again cheaply is worked out again and not kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array

from treadle_server.model.ops import erf_forward, sigmoid_forward


def linear_backward(weight: Array, dy: Array) -> Array:
    """Return dx `[rows, in]` of dy `[rows, out]`; see `linear_weight_backward` for the weight's."""
    dx: Array = np.matmul(dy, weight)
    return dx


def linear_weight_backward(x: Array, dy: Array) -> Array:
    """Return dweight `[out, in]` of dy `[rows, out]`."""
    dweight: Array = np.matmul(dy.T, x)
    return dweight


def linear_bias_backward(dy: Array) -> Array:
    """Return dbias `[out]` of dy `[rows, out]`."""
    dbias: Array = np.add.reduce(dy, axis=0)
    return dbias


def embedding_backward(token_ids: NDArray[np.int64], dy: Array, dweight: Array) -> None:
    """Add dy `[rows, width]` to the rows of dweight `[vocab, width]` that were looked up, always in the same order."""
    if not len(token_ids):
        return
    order = np.argsort(token_ids, kind="stable")
    ids = token_ids[order]
    firsts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    dweight[ids[firsts]] += np.add.reduceat(dy[order], firsts, axis=0)


def rms_norm_backward(x: Array, weight: Array | None, eps: float, dy: Array) -> tuple[Array, Array | None]:
    """Return dx `[..., dim]` and dweight (weight's shape, or None) of dy `[..., dim]`."""
    inverse = 1.0 / np.sqrt(_row_mean(x, x) + eps)  # [..., 1]
    normalized = x * inverse
    dweight = None if weight is None else _sum_to(dy * normalized, weight.shape)
    dx = dy.copy() if weight is None else dy * weight
    dx -= normalized * _row_mean(dx, normalized)
    dx *= inverse
    return dx, dweight


def layer_norm_backward(
    x: Array, weight: Array | None, bias: Array | None, eps: float, dy: Array
) -> tuple[Array, Array | None, Array | None]:
    """Return dx `[..., dim]`, dweight and dbias (None where the norm has none) of dy `[..., dim]`."""
    normalized = x - np.mean(x, axis=-1, keepdims=True)
    inverse = 1.0 / np.sqrt(_row_mean(normalized, normalized) + eps)  # [..., 1]
    normalized *= inverse
    dweight = None if weight is None else _sum_to(dy * normalized, weight.shape)
    dbias = None if bias is None else _sum_to(dy, bias.shape)
    dx = dy.copy() if weight is None else dy * weight
    mean = np.mean(dx, axis=-1, keepdims=True)
    dx -= normalized * _row_mean(dx, normalized)
    dx -= mean
    dx *= inverse
    return dx, dweight, dbias


def _row_mean(x: Array, y: Array) -> Array:
    """Return the mean of x * y along the last axis, `[..., 1]`."""
    mean: Array = np.einsum("...i,...i->...", x, y)[..., None] / x.shape[-1]
    return mean


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x `[..., *shape]` over its leading axes."""
    total: Array = np.add.reduce(x.reshape(-1, *shape), axis=0)
    return total


def softmax_backward(y: Array, dy: Array) -> Array:
    """Return dx of y = softmax(x) along the last axis; entries that are 0 in y get 0."""
    dx: Array = dy - np.einsum("...i,...i->...", y, dy)[..., None]
    dx *= y
    return dx


def softcap_backward(y: Array, cap: float, dy: Array) -> Array:
    """Return dx of y = cap * tanh(x / cap), made from y."""
    slope = y * (1.0 / cap)
    slope *= slope
    return dy - dy * slope


def sigmoid_backward(y: Array, dy: Array) -> Array:
    """Return dx of y = 1 / (1 + exp(-x)), made from y."""
    return dy * y * (1.0 - y)


def silu_slope(x: Array) -> tuple[Array, Array]:
    """Return x * sigmoid(x) and its derivative."""
    gate = np.tanh(0.5 * x)  # sigmoid(x) = (1 + tanh(x / 2)) / 2: one call, and nothing that overflows
    gate *= 0.5
    gate += 0.5
    y: Array = x * gate
    slope = 1.0 - gate
    slope *= y
    slope += gate
    return y, slope


def gelu_slope(x: Array) -> tuple[Array, Array]:
    """Return x * Phi(x) and its derivative, Phi(x) + x * density(x)."""
    phi = erf_forward(x * math.sqrt(0.5))
    phi += 1.0
    phi *= 0.5
    y = x * phi
    phi += x * np.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    return y, phi


def gelu_quick_slope(x: Array) -> tuple[Array, Array]:
    """Return x * sigmoid(1.702 x) and its derivative."""
    gate = sigmoid_forward(x * 1.702)
    y = x * gate
    slope = 1.0 - gate
    slope *= 1.702 * y
    slope += gate
    return y, slope


def gelu_tanh_slope(x: Array) -> tuple[Array, Array]:
    """Return 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative."""
    square = x * x
    tanh = np.tanh(math.sqrt(2 / math.pi) * x * (1.0 + 0.044715 * square))
    slope = 1.0 - tanh * tanh
    slope *= x * (1.0 + 3 * 0.044715 * square)
    slope *= math.sqrt(2 / math.pi)
    tanh += 1.0
    slope += tanh
    slope *= 0.5
    tanh *= 0.5
    return x * tanh, slope


def relu_slope(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0) and its derivative; 0 where x is 0."""
    return np.maximum(x, 0.0), (x > 0).astype(x.dtype)


def relu_squared_slope(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0)^2 and its derivative."""
    y = np.maximum(x, 0.0)
    return y * y, 2.0 * y
