"""What passes are written over: the operations that a faster backend replaces, forward and back, as NumPy does them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array, Observer
from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig

from treadle_server.model import ops, ops_backward
from treadle_server.model.activations import hidden_backward, hidden_forward
from treadle_server.model.attention import Scoring, attention_backward, attention_forward
from treadle_server.model.prepared import Linear, Norm
from treadle_server.model.rotary import rotary_backward, rotary_forward


class Primitives:
    """Operations in one dtype. Those that fill `out` return it."""

    def __init__(self, dtype: DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` with x `[rows, in]` @ weight.T + bias."""
        return ops.linear_forward(x, linear.weight, linear.bias, out)

    def norm(self, config: DecoderConfig, x: Array, norm: Norm, out: Array) -> Array:
        """Fill out `[..., dim]` with the normalised x; out may be x."""
        if config.norm.kind == "rms":
            return ops.rms_norm_forward(x, norm.weight, config.norm.eps, out)
        return ops.layer_norm_forward(x, norm.weight, norm.bias, config.norm.eps, out)

    def rotary(self, x: Array, cos: Array, signed_sin: Array) -> None:
        """Turn x `[tokens, heads, 2, half]` in place."""
        rotary_forward(x, cos, signed_sin, out=x)

    def attention(
        self, q: Array, keys: Array, values: Array, length: int, scoring: Scoring, out: Array, observe: Observer | None
    ) -> None:
        """Fill out `[rows, kv_heads, group, head_dim]`; see `attention_forward`."""
        attention_forward(q, keys, values, length, scoring, out, observe)

    def activation(self, config: DecoderConfig, up: Array) -> Array:
        """Return `[tokens, hidden]` of up, which may be written to, or of gate beside up `[tokens, 2 * hidden]`."""
        return hidden_forward(config.mlp, up)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def linear_backward(self, linear: Linear, dy: Array) -> Array:
        """Return dx `[rows, in]` of dy `[rows, out]`."""
        return ops_backward.linear_backward(linear.weight, dy)

    def weight_backward(self, x: Array, dy: Array) -> Array:
        """Return dweight `[out, in]` of x `[rows, in]` and dy `[rows, out]`."""
        return ops_backward.linear_weight_backward(x, dy)

    def add_weight_backward(self, x: Array, dy: Array, dweight: Array) -> None:
        """Add to dweight `[out, in]` what `weight_backward` returns."""
        dweight += ops_backward.linear_weight_backward(x, dy)

    def norm_backward(
        self, config: DecoderConfig, x: Array, norm: Norm, dy: Array
    ) -> tuple[Array, Array | None, Array | None]:
        """Return dx `[..., dim]`, dweight and dbias (None where the norm has none) of dy `[..., dim]`."""
        if config.norm.kind == "rms":
            return (*ops_backward.rms_norm_backward(x, norm.weight, config.norm.eps, dy), None)
        return ops_backward.layer_norm_backward(x, norm.weight, norm.bias, config.norm.eps, dy)

    def rotary_backward(self, dy: Array, cos: Array, signed_sin: Array) -> None:
        """Turn dy `[tokens, heads, 2, half]` back in place."""
        rotary_backward(dy, cos, signed_sin, out=dy)

    def attention_backward(
        self,
        attention: AttentionConfig,
        scoring: Scoring,
        starts: NDArray[np.int64],
        qkv: Array,
        heads: Array,
        dheads: Array,
    ) -> Array:
        """Return dqkv of qkv `[tokens, heads + 2 kv_heads, head_dim]`, in which whole sequences stand.

        heads and dheads `[tokens, heads * head_dim]` are what they made and its gradient.
        """
        num_heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        dqkv = np.empty_like(qkv)
        for start, stop in pairwise(starts.tolist()):
            rows = slice(start, stop)
            by_group = (stop - start, kv_heads, attention.group_size, head_dim)
            dq, dk, dv = attention_backward(
                qkv[rows, :num_heads].reshape(by_group),
                qkv[rows, num_heads : num_heads + kv_heads].transpose(1, 0, 2),
                qkv[rows, num_heads + kv_heads :].transpose(1, 0, 2),
                scoring,
                heads[rows].reshape(by_group),
                dheads[rows].reshape(by_group),
            )
            dqkv[rows, :num_heads] = dq.reshape(-1, num_heads, head_dim)
            dqkv[rows, num_heads : num_heads + kv_heads] = dk.transpose(1, 0, 2)
            dqkv[rows, num_heads + kv_heads :] = dv.transpose(1, 0, 2)
        return dqkv

    def activation_again(self, config: DecoderConfig, up: Array) -> tuple[Array, Array]:
        """Return what `activation` made, and what `activation_backward` needs; may write to up."""
        return hidden_backward(config.mlp, up)

    def activation_backward(self, config: DecoderConfig, slopes: Array, dhidden: Array) -> Array:
        """Return the gradient of up, `[tokens, hidden or 2 * hidden]`, of dhidden `[tokens, hidden]`."""
        by_half = slopes.reshape(len(slopes), -1, dhidden.shape[1])
        by_half *= dhidden[:, None]
        return slopes
