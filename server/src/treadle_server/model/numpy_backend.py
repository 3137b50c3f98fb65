"""The NumPy compute backend: the reference for the contract, and what every other backend falls back on.

`forward` is the one forward pass of every family. It is written over primitives (`linear`, `norm`, `rotary`,
`attention`, `activation`): a backend that is faster at one of them subclasses this one and overrides it. Buffers are
allocated once a pass and used by every layer, so that the cost of a decoded token is its matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array, Batch, CacheView, Observer, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model import moe, ops
from treadle_server.model.activations import ACTIVATIONS
from treadle_server.model.attention import Scoring, attention_forward
from treadle_server.model.backward import backward_pass, head_backward
from treadle_server.model.fused import fused_arrays, split_fused
from treadle_server.model.kv_cache import ScratchCache
from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder, prepare_decoder
from treadle_server.model.rotary import rotary_forward


@dataclass(slots=True)
class _Pass:
    """What one forward pass works on. Views are made once here, not once a layer."""

    config: DecoderConfig
    batch: Batch
    caches: Sequence[CacheView]
    turns: tuple[tuple[Array, Array, Array], ...]  # a rotary's pairs of queries and keys in qkv, cos, signed sin
    x: Array  # [tokens, dim], the residual stream
    normed: Array  # [tokens, dim]
    delta: Array  # [tokens, dim], what a sublayer adds
    qkv: Array  # [tokens, (heads + 2 kv_heads) * head_dim]
    q: Array  # [tokens, kv_heads, group, head_dim], view of qkv
    k: Array  # [kv_heads, tokens, head_dim], view of qkv
    v: Array  # [kv_heads, tokens, head_dim], view of qkv
    heads: Array  # [tokens, heads * head_dim]
    up: Array  # [tokens, hidden or 2 * hidden]
    saved: dict[str, Array] | None  # what the backward pass needs, see `backward.py`; None when there is none
    prefix: str = ""  # of the names in saved: the layer that runs

    def keep(self, name: str, array: Array) -> None:
        """Copy an array for the backward pass: the buffers are written to again."""
        if self.saved is not None:
            self.saved[self.prefix + name] = array.copy()


class NumpyBackend:
    """Computes in float32 or float64 with NumPy's BLAS, fast mode: sums may differ with the number of rows."""

    name = "numpy"

    def __init__(self, dtype: DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    def prepare(self, config: DecoderConfig, params: Mapping[str, Weight]) -> PreparedDecoder:
        """Read every weight once, straight into the buffer it is used from, widened to the backend's dtype."""
        return prepare_decoder(config, params, self.dtype)

    def forward(
        self, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView], observe: Observer | None = None
    ) -> Array:
        """Run the layers and return `hidden [tokens, dim]`, after the final norm."""
        return self._forward(prepared, batch, caches, observe, None)

    def forward_saving(self, prepared: PreparedDecoder, batch: Batch, saved: dict[str, Array]) -> Array:
        """Like `forward` on whole sequences; keeps in `saved` what `backward` needs."""
        config = prepared.config
        caches = [ScratchCache(config, self.dtype, length) for length in np.diff(batch.starts).tolist()]
        saved |= {"token_ids": batch.token_ids, "starts": batch.starts, "positions": batch.positions()}
        return self._forward(prepared, batch, caches, None, saved)

    def backward(self, prepared: PreparedDecoder, saved: Mapping[str, Array], dhidden: Array) -> dict[str, Array]:
        """Return the gradient of every canonical parameter given `dhidden [tokens, dim]`; that of a head is 0."""
        return backward_pass(prepared, saved, dhidden)

    def head_backward(self, prepared: PreparedDecoder, hidden: Array, dlogits: Array, grads: dict[str, Array]) -> Array:
        """Return `dhidden [rows, dim]` and add the gradients of what lies behind hidden to grads."""
        return head_backward(prepared, hidden, dlogits, grads)

    def parameters(self, prepared: PreparedDecoder) -> dict[str, Array]:
        """Return the canonical parameters as they are multiplied with, as views: writing to them changes the model.

        Norm scales that are stored minus one are here plus one.
        """
        return split_fused(prepared.config, fused_arrays(prepared))

    def _forward(
        self,
        prepared: PreparedDecoder,
        batch: Batch,
        caches: Sequence[CacheView],
        observe: Observer | None,
        saved: dict[str, Array] | None,
    ) -> Array:
        run = self._start(prepared, batch, caches, observe, saved)
        parallel = prepared.config.residual != "serial"
        for index, layer in enumerate(prepared.layers):
            run.prefix = f"layers.{index}."
            see = _within(observe, run.prefix)
            x = self._enter(run, layer.attention_norm, "attention", see)
            delta = self._attend(run, index, layer, x, see)
            if parallel:  # the feed-forward reads the stream as attention found it
                x = self._enter(run, layer.mlp_norm, "mlp", see) if layer.mlp_norm is not None else x
                self._leave(run, None, "attention", see, delta)
            else:
                self._leave(run, layer.attention_output_norm or layer.attention_norm, "attention", see, delta)
                x = self._enter(run, layer.mlp_norm, "mlp", see)
            delta = self._feed_forward(run, layer.mlp, x, see)
            self._leave(run, layer.mlp_output_norm or layer.mlp_norm, "mlp", see, delta)
        if prepared.final_norm is None:
            return run.x
        run.prefix = ""
        run.keep("final_in", run.x)
        hidden = self.norm(run.config, run.x, prepared.final_norm, run.x)
        _show(observe, "final_norm", hidden)
        return hidden

    def head(self, prepared: PreparedDecoder, hidden: Array, observe: Observer | None = None) -> Array:
        """Return `logits [rows, vocab]` of `hidden [rows, dim]`."""
        config = prepared.config
        if prepared.embedding_out is not None:
            narrow = np.empty((len(hidden), config.embedding_width), self.dtype)
            hidden = self.linear(hidden, prepared.embedding_out, narrow)
            _show(observe, "embedding_out", hidden)
        logits = np.empty((len(hidden), config.vocab_size), self.dtype)
        self.linear(hidden, prepared.head, logits)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.logit_softcap is not None:
            ops.softcap_forward(logits, config.logit_softcap, out=logits)
        _show(observe, "logits", logits)
        return logits

    # ---- primitives -------------------------------------------------------------------------------------------------

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
        """Return `[tokens, hidden]` of up, or of gate beside up `[tokens, 2 * hidden]`; may write to its argument."""
        function = ACTIVATIONS[config.mlp.activation]
        if not config.mlp.gated:
            return function(up, up)
        hidden_dim = up.shape[1] // 2
        activated = function(up[:, :hidden_dim], None)
        activated *= up[:, hidden_dim:]
        return activated

    # ---- the forward pass -------------------------------------------------------------------------------------------

    def _start(
        self,
        prepared: PreparedDecoder,
        batch: Batch,
        caches: Sequence[CacheView],
        observe: Observer | None,
        saved: dict[str, Array] | None,
    ) -> _Pass:
        config, attention, tokens = prepared.config, prepared.config.attention, batch.num_tokens
        positions = batch.positions()
        head_dim, kv_heads, num_heads = attention.head_dim, attention.num_kv_heads, attention.num_heads
        qkv = np.empty((tokens, num_heads + 2 * kv_heads, head_dim), self.dtype)
        turning = qkv[:, : num_heads + kv_heads]
        lengths = batch.lengths_reached(positions) if config.positions.depends_on_length else positions
        tables = [rotary.table(positions, lengths, self.dtype) for rotary in prepared.rotaries]
        if saved is not None:
            for rotary_id, (cos, signed_sin) in enumerate(tables):
                saved |= {f"rotary.{rotary_id}.cos": cos, f"rotary.{rotary_id}.signed_sin": signed_sin}
        return _Pass(
            config=config,
            batch=batch,
            caches=caches,
            turns=tuple(
                (rotary.pairs(turning), *table) for rotary, table in zip(prepared.rotaries, tables, strict=True)
            ),
            x=self._embed(prepared, batch, positions, observe, saved),
            normed=np.empty((tokens, config.dim), self.dtype),
            delta=np.empty((tokens, config.dim), self.dtype),
            qkv=qkv.reshape(tokens, -1),
            q=qkv[:, :num_heads].reshape(tokens, kv_heads, attention.group_size, head_dim),
            k=qkv[:, num_heads : num_heads + kv_heads].transpose(1, 0, 2),
            v=qkv[:, num_heads + kv_heads :].transpose(1, 0, 2),
            heads=np.empty((tokens, num_heads * head_dim), self.dtype),
            up=np.empty((tokens, config.mlp.hidden_dim * (2 if config.mlp.gated else 1)), self.dtype),
            saved=saved,
        )

    def _embed(
        self,
        prepared: PreparedDecoder,
        batch: Batch,
        positions: NDArray[np.int64],
        observe: Observer | None,
        saved: dict[str, Array] | None,
    ) -> Array:
        config = prepared.config
        x: Array = prepared.embedding[batch.token_ids]  # [tokens, width]
        if config.embedding_scale != 1.0:
            x *= config.embedding_scale
        if prepared.embedding_in is not None:
            x = self.linear(x, prepared.embedding_in, np.empty((len(x), config.dim), self.dtype))
        _show(observe, "embedding", x)
        if prepared.embedding_norm is not None:
            if saved is not None:
                saved["embedding_norm_in"] = x.copy()
            _show(observe, "embedding_norm", self.norm(config, x, prepared.embedding_norm, x))
        if config.positions.kind not in ("learned", "sinusoidal"):
            return x
        if prepared.positions is not None:
            added = prepared.positions[positions + config.positions.offset]
        else:
            added = ops.sinusoidal_positions(positions, config.dim, self.dtype)
        _show(observe, "positions", added)
        x += added
        _show(observe, "embedding_with_positions", x)
        return x

    def _enter(self, run: _Pass, norm: Norm | None, name: str, see: Observer | None) -> Array:
        """Return what a sublayer reads: the residual stream, normalised when the norm stands before."""
        run.keep(f"{name}_in", run.x)
        if norm is None or not run.config.norm.before:
            return run.x
        normed = self.norm(run.config, run.x, norm, run.normed)
        _show(see, f"{name}_norm", normed)
        return normed

    def _leave(self, run: _Pass, norm: Norm | None, name: str, see: Observer | None, delta: Array) -> None:
        """Add what a sublayer made to the residual stream, with the norm that stands behind, on either side of it."""
        config = run.config
        if config.norm.behind and norm is not None:
            run.keep(f"{name}_out", delta)
            _show(see, f"{name}_output_norm", self.norm(config, delta, norm, delta))
        if config.residual_scale != 1.0:
            delta *= config.residual_scale
        if config.residual_from_norm:
            np.add(run.normed, delta, out=run.x)
        else:
            run.x += delta
        _show(see, f"{name}_residual", run.x)
        if config.norm.place == "post" and norm is not None:
            run.keep(f"{name}_sum", run.x)
            _show(see, f"{name}_norm", self.norm(config, run.x, norm, run.x))

    def _attend(self, run: _Pass, index: int, layer: Layer, x: Array, see: Observer | None) -> Array:
        """Return the attention sublayer's output `[tokens, dim]` and store the new keys and values."""
        self.linear(x, layer.qkv, run.qkv)
        clip = run.config.attention.clip_qkv
        if clip is not None:
            np.clip(run.qkv, -clip, clip, out=run.qkv)
        _show_qkv(see, run, "")
        if clip is not None or layer.q_norm is not None:
            run.keep("qkv_in", run.qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(run, layer.q_norm, layer.k_norm)
            _show_qkv(see, run, "_normed")
        if layer.rotary_id is not None:
            self.rotary(*run.turns[layer.rotary_id])
            _show_qkv(see, run, "_rotated")
        run.keep("qkv", run.qkv)
        self._attend_each(run, index, layer.scoring, _within(see, "attention."))
        run.keep("heads", run.heads)
        _show(see, "attention.heads", run.heads)
        projected = self.linear(run.heads, layer.out, run.delta)
        _show(see, "attention.projection", projected)
        return projected

    def _norm_heads(self, run: _Pass, q_norm: Norm, k_norm: Norm) -> None:
        """Normalise queries and keys in place: head by head, or all of a token's heads as one vector."""
        attention = run.config.attention
        query_width = attention.num_heads * attention.head_dim
        key_end = query_width + attention.num_kv_heads * attention.head_dim
        for norm, columns in ((q_norm, slice(0, query_width)), (k_norm, slice(query_width, key_end))):
            x = run.qkv[:, columns]
            if attention.qk_norm != "whole":
                x = x.reshape(len(x), -1, attention.head_dim)  # a view: only the last axis is cut
            self.norm(run.config, x, norm, x)

    def _attend_each(self, run: _Pass, index: int, scoring: Scoring, see: Observer | None) -> None:
        """Let every sequence attend over its own cache."""
        out = run.heads.reshape(run.q.shape)
        starts = run.batch.starts.tolist()
        for cache, start, stop in zip(run.caches, starts, starts[1:], strict=False):
            length = cache.length
            keys, values = cache.layer(index)
            keys[:, length : length + stop - start] = run.k[:, start:stop]
            values[:, length : length + stop - start] = run.v[:, start:stop]
            self.attention(run.q[start:stop], keys, values, length, scoring, out[start:stop], see)

    def _feed_forward(self, run: _Pass, mlp: Mlp | Experts, x: Array, see: Observer | None) -> Array:
        """Return the feed-forward sublayer's output `[tokens, dim]`."""
        if isinstance(mlp, Experts):
            out = self._mix_experts(run, mlp, x, see)
        else:
            keep = None if run.saved is None else run.keep
            out = self._expand(run.config, mlp, x, run.up, run.delta, see, keep)
        _show(see, "mlp.down", out)
        return out

    def _expand(
        self,
        config: DecoderConfig,
        mlp: Mlp,
        x: Array,
        up: Array,
        out: Array,
        see: Observer | None = None,
        keep: Observer | None = None,
    ) -> Array:
        """Fill out `[rows, dim]` with one feed-forward of x `[rows, dim]`; `up` is room for its hidden layer."""
        self.linear(x, mlp.up, up)
        if keep is not None:
            keep("up", up)
        if see is not None:
            hidden_dim = mlp.down.weight.shape[1]
            _show(see, "mlp.up", up[:, -hidden_dim:])
            if config.mlp.gated:
                _show(see, "mlp.gate", up[:, :hidden_dim])
        activated = self.activation(config, up)
        if see is not None:
            _show(see, "mlp.activated", activated)
        return self.linear(activated, mlp.down, out)

    def _mix_experts(self, run: _Pass, experts: Experts, x: Array, see: Observer | None) -> Array:
        """Return the weighted sum of the experts that each token goes to; no other expert computes anything."""
        config = run.config
        scores = self.linear(x, experts.router, np.empty((len(x), len(experts.each)), self.dtype))
        run.keep("router", scores)
        _show(see, "mlp.router", scores)
        ids, weights = moe.route_forward(scores, experts.config)
        _show(see, "mlp.expert_ids", ids)
        _show(see, "mlp.expert_weights", weights)
        run.delta[...] = 0
        for expert, rows, share in moe.rows_by_expert(ids, weights):
            run.delta[rows] += self._apply_expert(config, experts.each[expert], x[rows]) * share
        if experts.shared is not None:
            shared = self._apply_expert(config, experts.shared, x)
            if experts.shared_gate is not None:
                gate = self.linear(x, experts.shared_gate, np.empty((len(x), 1), self.dtype))
                shared *= ops.sigmoid_forward(gate, out=gate)
            _show(see, "mlp.shared", shared)
            run.delta += shared
        return run.delta

    def _apply_expert(self, config: DecoderConfig, mlp: Mlp, x: Array) -> Array:
        up = np.empty((len(x), len(mlp.up.weight)), self.dtype)
        return self._expand(config, mlp, x, up, np.empty((len(x), config.dim), self.dtype))


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
