"""The NumPy compute backend: the reference for the contract, and what every other backend falls back on.

`forward` is the one forward pass of every family. It is written over primitives (`embed`, `norm`, `linear`, `rotary`,
`attention`, `activation`): a backend that is faster at one of them subclasses this one and overrides it. Buffers are
allocated once a pass and used by every layer, so that the cost of a decoded token is its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array, Batch, CacheView, Observer, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model import ops
from treadle_server.model.attention import attention_forward, reproducible_attention_forward
from treadle_server.model.params import check_params

# Rows multiplied at once in reproducible mode. A multiple of every OpenBLAS micro-kernel's width, so that no row of a
# tile meets an edge kernel, whatever the machine.
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Linear:
    """weight `[out, in]`, bias `[out]` or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Norm:
    """weight `[dim]`, bias `[dim]` or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's matrices; `qkv` stacks q, k, v, and `up` stacks gate and up when the feed-forward is gated."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class PreparedDecoder:
    """A decoder ready to run: every array in the dtype that is computed in."""

    config: DecoderConfig
    embedding: Array  # [vocab, dim]
    positions: Array | None  # [context, dim], learned positions
    frequencies: NDArray[np.float64] | None  # [head_dim / 2], rotary positions
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    head: Linear  # a tied head's weight is `embedding` itself


@dataclass(slots=True)
class _Pass:
    """What one forward pass works on. Views are made once here, not once a layer."""

    config: DecoderConfig
    batch: Batch
    caches: Sequence[CacheView]
    rotary: tuple[Array, Array] | None  # cos, signed sin
    x: Array  # [tokens, dim], the residual stream
    normed: Array  # [tokens, dim]
    delta: Array  # [tokens, dim], what a sublayer adds
    qkv: Array  # [tokens, (heads + 2 kv_heads) * head_dim]
    turned: Array  # [tokens, heads + kv_heads, 2, head_dim / 2], the queries and keys of qkv
    q: Array  # [tokens, kv_heads, group, head_dim], view of qkv
    k: Array  # [kv_heads, tokens, head_dim], view of qkv
    v: Array  # [kv_heads, tokens, head_dim], view of qkv
    heads: Array  # [tokens, heads * head_dim]
    up: Array  # [tokens, hidden or 2 * hidden]


class NumpyBackend:
    """Computes in float32 or float64 with NumPy's BLAS, fast mode: sums may differ with the number of rows."""

    name = "numpy"

    def __init__(self, dtype: DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    def prepare(self, config: DecoderConfig, params: Mapping[str, Weight]) -> PreparedDecoder:
        """Read every weight once, straight into the buffer it is used from, widened to the backend's dtype."""
        check_params(config, params)
        reader = _Reader(params, self.dtype)
        embedding = reader.matrix("embedding")
        rotary = config.positions.rotary
        return PreparedDecoder(
            config=config,
            embedding=embedding,
            positions=reader.matrix("positions") if config.positions.kind == "learned" else None,
            frequencies=ops.rotary_frequencies(rotary, config.attention.head_dim) if rotary else None,
            layers=tuple(_read_layer(reader, f"layers.{i}.", gated=config.mlp.gated) for i in range(config.num_layers)),
            final_norm=reader.norm("final_norm") if config.has_final_norm else None,
            head=Linear(embedding if config.tied_head else reader.matrix("head"), reader.vector("head.bias")),
        )

    def forward(
        self, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView], observe: Observer | None = None
    ) -> Array:
        """Run the layers and return `hidden [tokens, dim]`, after the final norm."""
        run = self._start(prepared, batch, caches, observe)
        for index, layer in enumerate(prepared.layers):
            see = _within(observe, f"layers.{index}.")
            x = self._enter(run, layer.attention_norm, "attention", see)
            self._leave(run, layer.attention_norm, "attention", see, self._attend(run, index, layer, x, see))
            x = self._enter(run, layer.mlp_norm, "mlp", see)
            self._leave(run, layer.mlp_norm, "mlp", see, self._feed_forward(run, layer, x, see))
        if prepared.final_norm is None:
            return run.x
        hidden = self.norm(run.config, run.x, prepared.final_norm, run.x)
        _show(observe, "final_norm", hidden)
        return hidden

    def head(self, prepared: PreparedDecoder, hidden: Array, observe: Observer | None = None) -> Array:
        """Return `logits [rows, vocab]` of `hidden [rows, dim]`."""
        logits = np.empty((len(hidden), prepared.config.vocab_size), self.dtype)
        self.linear(hidden, prepared.head, logits)
        _show(observe, "logits", logits)
        return logits

    # ---- primitives -------------------------------------------------------------------------------------------------

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` with x `[rows, in]` @ weight.T + bias."""
        return ops.linear_forward(x, linear.weight, linear.bias, out)

    def norm(self, config: DecoderConfig, x: Array, norm: Norm, out: Array) -> Array:
        """Fill out `[rows, dim]` with the normalised x; out may be x."""
        if config.norm.kind == "rms":
            return ops.rms_norm_forward(x, norm.weight, config.norm.eps, out)
        return ops.layer_norm_forward(x, norm.weight, norm.bias, config.norm.eps, out)

    def rotary(self, x: Array, cos: Array, signed_sin: Array) -> None:
        """Turn x `[tokens, heads, 2, half]` in place."""
        ops.rotary_forward(x, cos, signed_sin, out=x)

    def attention(
        self, q: Array, keys: Array, values: Array, length: int, scale: float, out: Array, observe: Observer | None
    ) -> None:
        """Fill out `[rows, kv_heads, group, head_dim]`; see `attention_forward`."""
        attention_forward(q, keys, values, length, scale, out, observe)

    def activation(self, config: DecoderConfig, up: Array) -> Array:
        """Return `[tokens, hidden]` of up, or of gate beside up `[tokens, 2 * hidden]`; may write to its argument."""
        function = _ACTIVATIONS[config.mlp.activation]
        if not config.mlp.gated:
            return function(up, up)
        gate, up = up[:, : config.mlp.hidden_dim], up[:, config.mlp.hidden_dim :]
        activated = function(gate, None)
        activated *= up
        return activated

    # ---- the forward pass -------------------------------------------------------------------------------------------

    def _start(
        self, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView], observe: Observer | None
    ) -> _Pass:
        config, attention, tokens = prepared.config, prepared.config.attention, batch.num_tokens
        positions = batch.positions()
        head_dim, kv_heads, num_heads = attention.head_dim, attention.num_kv_heads, attention.num_heads
        qkv = np.empty((tokens, num_heads + 2 * kv_heads, head_dim), self.dtype)
        turned = qkv[:, : num_heads + kv_heads]
        frequencies = prepared.frequencies
        return _Pass(
            config=config,
            batch=batch,
            caches=caches,
            rotary=None if frequencies is None else ops.rotary_table(frequencies, positions, self.dtype),
            x=self._embed(prepared, batch, positions, observe),
            normed=np.empty((tokens, config.dim), self.dtype),
            delta=np.empty((tokens, config.dim), self.dtype),
            qkv=qkv.reshape(tokens, -1),
            turned=turned.reshape(tokens, num_heads + kv_heads, 2, -1) if frequencies is not None else turned,
            q=qkv[:, :num_heads].reshape(tokens, kv_heads, attention.group_size, head_dim),
            k=qkv[:, num_heads : num_heads + kv_heads].transpose(1, 0, 2),
            v=qkv[:, num_heads + kv_heads :].transpose(1, 0, 2),
            heads=np.empty((tokens, num_heads * head_dim), self.dtype),
            up=np.empty((tokens, config.mlp.hidden_dim * (2 if config.mlp.gated else 1)), self.dtype),
        )

    def _embed(
        self, prepared: PreparedDecoder, batch: Batch, positions: NDArray[np.int64], observe: Observer | None
    ) -> Array:
        config = prepared.config
        x = prepared.embedding[batch.token_ids]  # [tokens, dim]
        if config.embedding_scale != 1.0:
            x *= config.embedding_scale
        _show(observe, "embedding", x)
        if config.positions.kind == "rotary":
            return x
        if prepared.positions is not None:
            added = prepared.positions[positions]
        else:
            added = ops.sinusoidal_positions(positions, config.dim, self.dtype)
        _show(observe, "positions", added)
        x += added
        _show(observe, "embedding_with_positions", x)
        return x

    def _enter(self, run: _Pass, norm: Norm, name: str, see: Observer | None) -> Array:
        """Return what a sublayer reads: the residual stream, normalised when the norm stands before."""
        if run.config.norm.place == "post":
            return run.x
        normed = self.norm(run.config, run.x, norm, run.normed)
        _show(see, f"{name}_norm", normed)
        return normed

    def _leave(self, run: _Pass, norm: Norm, name: str, see: Observer | None, delta: Array) -> None:
        """Add what a sublayer made to the residual stream, and normalise that when the norm stands behind."""
        run.x += delta
        _show(see, f"{name}_residual", run.x)
        if run.config.norm.place == "post":
            _show(see, f"{name}_norm", self.norm(run.config, run.x, norm, run.x))

    def _attend(self, run: _Pass, index: int, layer: Layer, x: Array, see: Observer | None) -> Array:
        """Return the attention sublayer's output `[tokens, dim]` and store the new keys and values."""
        self.linear(x, layer.qkv, run.qkv)
        _show_qkv(see, run, "")
        if run.rotary is not None:
            self.rotary(run.turned, *run.rotary)
            _show_qkv(see, run, "_rotated")
        self._attend_each(run, index, _within(see, "attention."))
        _show(see, "attention.heads", run.heads)
        projected = self.linear(run.heads, layer.out, run.delta)
        _show(see, "attention.projection", projected)
        return projected

    def _attend_each(self, run: _Pass, index: int, see: Observer | None) -> None:
        """Let every sequence attend over its own cache."""
        out = run.heads.reshape(run.q.shape)
        scale = run.config.attention.scale
        starts = run.batch.starts.tolist()
        for cache, start, stop in zip(run.caches, starts, starts[1:], strict=False):
            length = cache.length
            keys, values = cache.layer(index)
            keys[:, length : length + stop - start] = run.k[:, start:stop]
            values[:, length : length + stop - start] = run.v[:, start:stop]
            self.attention(run.q[start:stop], keys, values, length, scale, out[start:stop], see)

    def _feed_forward(self, run: _Pass, layer: Layer, x: Array, see: Observer | None) -> Array:
        """Return the feed-forward sublayer's output `[tokens, dim]`."""
        up = self.linear(x, layer.up, run.up)
        _show(see, "mlp.up", up[:, -run.config.mlp.hidden_dim :])
        if run.config.mlp.gated:
            _show(see, "mlp.gate", up[:, : run.config.mlp.hidden_dim])
        activated = self.activation(run.config, up)
        _show(see, "mlp.activated", activated)
        down = self.linear(activated, layer.down, run.delta)
        _show(see, "mlp.down", down)
        return down


class ReproducibleNumpyBackend(NumpyBackend):
    """A row's result never depends, not in one bit, on what else is in the batch or on how a prompt was cut."""

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` by products of one shape: tiles of TILE_ROWS rows, the last one padded with zeros."""
        rows = len(x)
        whole = rows - rows % TILE_ROWS
        for start in range(0, whole, TILE_ROWS):
            ops.linear_forward(x[start : start + TILE_ROWS], linear.weight, linear.bias, out[start : start + TILE_ROWS])
        if whole < rows:
            tile = np.zeros((TILE_ROWS, x.shape[1]), x.dtype)
            tile[: rows - whole] = x[whole:]
            out[whole:] = ops.linear_forward(tile, linear.weight, linear.bias)[: rows - whole]
        return out

    def attention(
        self, q: Array, keys: Array, values: Array, length: int, scale: float, out: Array, observe: Observer | None
    ) -> None:
        """Attend per query row over blocks of keys at absolute positions; an observed pass runs in fast mode."""
        if observe is not None:
            attention_forward(q, keys, values, length, scale, out, observe)
        else:
            reproducible_attention_forward(q, keys, values, length, scale, out)


_ACTIVATIONS: Mapping[str, Callable[[Array, Array | None], Array]] = MappingProxyType(
    {
        "silu": ops.silu_forward,
        "gelu_tanh": ops.gelu_tanh_forward,
        "relu": ops.relu_forward,
    }
)


class _Reader:
    """Reads canonical parameters into new arrays of one dtype."""

    def __init__(self, params: Mapping[str, Weight], dtype: np.dtype[np.generic]) -> None:
        self._params = params
        self._dtype = dtype

    def matrix(self, *names: str) -> Array:
        """Return the named matrices' rows one after the other, `[rows, in]`."""
        return self._stack([f"{name}.weight" for name in names])

    def vector(self, name: str) -> Array | None:
        """Return a bias, or None if the model has none of that name."""
        return self._stack([name]) if name in self._params else None

    def linear(self, prefix: str, *names: str) -> Linear:
        """Return the named projections fused into one."""
        biases = [f"{prefix}{name}.bias" for name in names]
        has_bias = biases[0] in self._params
        return Linear(self.matrix(*(prefix + name for name in names)), self._stack(biases) if has_bias else None)

    def norm(self, name: str) -> Norm:
        """Return a norm's scale and offset."""
        return Norm(self._stack([f"{name}.weight"]), self.vector(f"{name}.bias"))

    def _stack(self, names: Sequence[str]) -> Array:
        weights = [self._params[name] for name in names]
        rows = sum(weight.shape[0] for weight in weights)
        stacked = np.empty((rows, *weights[0].shape[1:]), self._dtype)
        start = 0
        for weight in weights:
            weight.read_into(stacked[start : start + weight.shape[0]])
            start += weight.shape[0]
        return stacked


def _read_layer(reader: _Reader, prefix: str, *, gated: bool) -> Layer:
    return Layer(
        attention_norm=reader.norm(f"{prefix}attention_norm"),
        qkv=reader.linear(f"{prefix}attention.", "q", "k", "v"),
        out=reader.linear(f"{prefix}attention.", "o"),
        mlp_norm=reader.norm(f"{prefix}mlp_norm"),
        up=reader.linear(f"{prefix}mlp.", *(("gate", "up") if gated else ("up",))),
        down=reader.linear(f"{prefix}mlp.", "down"),
    )


def _within(observe: Observer | None, prefix: str) -> Observer | None:
    """Return an observer that puts a prefix before every name."""
    return None if observe is None else lambda name, array: observe(prefix + name, array)


def _show(observe: Observer | None, name: str, array: Array) -> None:
    """Hand the observer a copy: the buffer is written to again."""
    if observe is not None:
        observe(name, array.copy())


def _show_qkv(observe: Observer | None, run: _Pass, suffix: str) -> None:
    if observe is not None:
        heads = run.q.reshape(len(run.q), -1, run.q.shape[3]).transpose(1, 0, 2)
        observe(f"attention.q{suffix}", heads.copy())
        observe(f"attention.k{suffix}", run.k.copy())
        if not suffix:
            observe("attention.v", run.v.copy())
