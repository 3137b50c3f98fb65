"""The backend that trains: NumPy's passes over compiled operations, each on the thread that calls it.

A trainer gives every thread rows of its own, so an operation needs no other. What an operation does not fit (another
norm, interleaved rotary pairs, soft-capped scores, arrays that do not lie close) is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Observer
from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig
from treadle_server.model.attention import Scoring
from treadle_server.model.kv_cache import ScratchCache
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.model.pass_state import Pass
from treadle_server.model.prepared import Linear, Norm, PreparedDecoder
from treadle_server.training import losses, optimizers

from treadle_kernels import training_attention as attending
from treadle_kernels import training_products, training_rows
from treadle_kernels.stored import address_of
from treadle_kernels.training_functions import adamw, cross_entropy

NO_WINDOW = 1 << 40


class TrainingBackend(NumpyBackend):
    """float32, compiled. Its bits depend on the rows that a thread has, on nothing else."""

    name = "kernels"

    def __init__(self) -> None:
        super().__init__(np.float32)

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same as one of the server's losses and optimizers, compiled, or the function itself."""
        twins: dict[Callable[..., Any], Callable[..., Any]] = {
            losses.cross_entropy: cross_entropy,
            optimizers.adamw: adamw,
        }
        return twins.get(function, function)

    def backward(
        self,
        prepared: PreparedDecoder,
        saved: dict[str, Array],
        dhidden: Array,
        wanted: Collection[str] | None = None,
    ) -> dict[str, Array]:
        """Return the wanted gradients given `dhidden [tokens, dim]`; see the contract."""
        return super().backward(prepared, saved, np.ascontiguousarray(dhidden, np.float32), wanted)

    # ---- products ---------------------------------------------------------------------------------------------------

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` with x `[rows, in]` @ weight.T + bias."""
        multiply(x, linear.weight.T, out)
        if linear.bias is not None:
            out += linear.bias
        return out

    def linear_backward(self, linear: Linear, dy: Array) -> Array:
        """Return dx `[rows, in]` of dy `[rows, out]`."""
        return multiply(dy, linear.weight, np.empty((len(dy), linear.weight.shape[1]), self.dtype))

    def weight_backward(self, x: Array, dy: Array) -> Array:
        """Return dweight `[out, in]` of x `[rows, in]` and dy `[rows, out]`."""
        return multiply(dy.T, x, np.empty((dy.shape[1], x.shape[1]), self.dtype))

    def add_weight_backward(self, x: Array, dy: Array, dweight: Array) -> None:
        """Add to dweight `[out, in]` what `weight_backward` returns."""
        multiply(dy.T, x, dweight, is_added=True)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def norm(self, config: DecoderConfig, x: Array, norm: Norm, out: Array) -> Array:
        """Fill out `[..., dim]` with the normalised x; out may be x."""
        if norm.weight is None or not _is_plain_norm(config, norm.weight, x, out):
            return super().norm(config, x, norm, out)
        weight = address_of(norm.weight)
        training_rows.rms_norm(_rows(x), weight, _rows(out), *x.shape, np.float32(config.norm.eps))
        return out

    def norm_backward(
        self, config: DecoderConfig, x: Array, norm: Norm, dy: Array
    ) -> tuple[Array, Array | None, Array | None]:
        """Return dx `[..., dim]`, dweight and dbias (None where the norm has none) of dy `[..., dim]`."""
        if norm.weight is None or not _is_plain_norm(config, norm.weight, x, dy):
            return super().norm_backward(config, x, norm, dy)
        dx, dweight = np.empty(x.shape, np.float32), np.zeros(x.shape[1], np.float32)
        arrays = (_rows(x), address_of(norm.weight), _rows(dy), _rows(dx), address_of(dweight))
        training_rows.rms_norm_backward(*arrays, *x.shape, np.float32(config.norm.eps))
        return dx, dweight, None

    def rotary(self, x: Array, cos: Array, signed_sin: Array) -> None:
        """Turn x `[tokens, heads, 2, half]` in place."""
        if not _turn(x, cos, signed_sin, 1.0):
            super().rotary(x, cos, signed_sin)

    def rotary_backward(self, dy: Array, cos: Array, signed_sin: Array) -> None:
        """Turn dy `[tokens, heads, 2, half]` back in place."""
        if not _turn(dy, cos, signed_sin, -1.0):
            super().rotary_backward(dy, cos, signed_sin)

    def activation(self, config: DecoderConfig, up: Array) -> Array:
        """Return `[tokens, hidden]` of up, which may be written to, or of gate beside up `[tokens, 2 * hidden]`."""
        return _gated(up) if _is_gated_silu(config) else super().activation(config, up)

    def activation_again(self, config: DecoderConfig, up: Array) -> tuple[Array, Array]:
        """Return what `activation` made, and what `activation_backward` needs; may write to up."""
        return (_gated(up), up) if _is_gated_silu(config) else super().activation_again(config, up)

    def activation_backward(self, config: DecoderConfig, slopes: Array, dhidden: Array) -> Array:
        """Return the gradient of up, `[tokens, hidden or 2 * hidden]`, of dhidden `[tokens, hidden]`."""
        if not _is_gated_silu(config):
            return super().activation_backward(config, slopes, dhidden)
        training_rows.gated_silu_backward(_rows(slopes), _rows(dhidden), *dhidden.shape)
        return slopes

    # ---- attention --------------------------------------------------------------------------------------------------

    def _attend_each(self, run: Pass, index: int, scoring: Scoring, see: Observer | None) -> None:
        """Let every sequence attend over its own cache; whole sequences that leave none attend compiled."""
        is_whole = all(isinstance(cache, ScratchCache) for cache in run.caches)
        if see is not None or not is_whole or not _is_plain_scoring(scoring):
            super()._attend_each(run, index, scoring, see)
            return
        shape, room = _attention_room(run.config.attention, scoring, run.batch.starts)
        attending.attention(shape, run.qkv, run.heads, run.batch.starts, room)

    def attention_backward(
        self,
        attention: AttentionConfig,
        scoring: Scoring,
        starts: NDArray[np.int64],
        qkv: Array,
        heads: Array,
        dheads: Array,
    ) -> Array:
        """Return dqkv of qkv `[tokens, heads + 2 kv_heads, head_dim]`, in which whole sequences stand."""
        if not _is_plain_scoring(scoring):
            return super().attention_backward(attention, scoring, starts, qkv, heads, dheads)
        shape, room = _attention_room(attention, scoring, starts)
        flat = np.ascontiguousarray(qkv).reshape(len(qkv), -1)
        dqkv = np.empty_like(flat)
        given = (np.ascontiguousarray(heads), np.ascontiguousarray(dheads))
        attending.attention_backward(shape, flat, *given, starts, dqkv, room)
        return dqkv.reshape(qkv.shape)


def multiply(a: Array, b: Array, out: Array, *, is_added: bool = False) -> Array:
    """Fill out `[rows, columns]` with a `[rows, terms]` @ b `[terms, columns]`, or add that to it."""
    shape = (*a.shape, b.shape[1])
    if 0 in shape or out.strides[1] != 4:
        out[...] = a @ b + (out if is_added else 0)
        return out
    a, b = _lying_close(a), _lying_close(b)
    room = np.empty(training_products.ROOM, np.float32)
    target = (address_of(out), out.strides[0])
    training_products.multiply((address_of(a), *a.strides), (address_of(b), *b.strides), target, shape, is_added, room)
    return out


def _lying_close(matrix: Array) -> Array:
    """Return a float32 matrix of which rows or columns lie close."""
    is_close = matrix.dtype == np.float32 and 4 in matrix.strides
    return matrix if is_close else np.ascontiguousarray(matrix, np.float32)


def _rows(x: Array) -> tuple[int, int]:
    """Return where the rows of x `[rows, width]` lie, and how far apart."""
    return address_of(x), x.strides[0]


def _is_plain_norm(config: DecoderConfig, weight: Array, x: Array, other: Array) -> bool:
    is_of_rows = config.norm.kind == "rms" and weight.ndim == 1 and x.ndim == 2
    return is_of_rows and x.strides[1] == other.strides[1] == 4


def _turn(x: Array, cos: Array, signed_sin: Array, sign: float) -> bool:
    """Turn x `[tokens, heads, 2, half]` in place; False, and nothing done, where pairs do not lie as halves do."""
    rows, heads, _, half = x.shape
    if x.strides[2:] != (4 * half, 4):
        return False
    tables = (_rows(cos[:, 0, 0]), _rows(signed_sin[:, 0, 1]))
    training_rows.turn_heads(_rows(x), *tables, np.float32(sign), rows, heads, x.strides[1], half)
    return True


def _is_gated_silu(config: DecoderConfig) -> bool:
    return config.mlp.gated and config.mlp.activation == "silu"


def _gated(up: Array) -> Array:
    hidden = np.empty((len(up), up.shape[1] // 2), np.float32)
    training_rows.gated_silu(_rows(up), _rows(hidden), *hidden.shape)
    return hidden


def _is_plain_scoring(scoring: Scoring) -> bool:
    return scoring.softcap is None and scoring.alibi is None and scoring.scale > 0


def _attention_room(
    attention: AttentionConfig, scoring: Scoring, starts: NDArray[np.int64]
) -> tuple[attending.Shape, Array]:
    window, scale = scoring.window or NO_WINDOW, np.float32(scoring.scale)
    shape = attending.Shape(attention.num_heads, attention.num_kv_heads, attention.head_dim, window, scale)
    return shape, np.empty(attending.room_of(shape, int(np.diff(starts).max(initial=0))), np.float32)
