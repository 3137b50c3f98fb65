"""The NumPy compute backend: the reference for the contract, and what every other backend falls back on.

`forward` is the one forward pass of every family. It is written over `Primitives`: a backend that is faster at one of
them subclasses this one and overrides it. Buffers are allocated once a pass and used by every layer, so that the cost
of a decoded token is its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Batch, CacheView, LowRank, Observer, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model import moe, ops
from treadle_server.model.adapters import RowAdapters
from treadle_server.model.attention import Scoring
from treadle_server.model.backward import backward_pass, head_backward
from treadle_server.model.fused import parameter_views
from treadle_server.model.kv_cache import ScratchCache
from treadle_server.model.pass_state import Pass, rotary_tables, show, show_qkv, within
from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder, prepare_decoder
from treadle_server.model.primitives import Primitives


class NumpyBackend(Primitives):
    """Computes in float32 or float64 with NumPy's BLAS, fast mode: sums may differ with the number of rows."""

    name = "numpy"

    def prepare(self, config: DecoderConfig, params: Mapping[str, Weight]) -> PreparedDecoder:
        """Read every weight once, straight into the buffer it is used from, widened to the backend's dtype."""
        return prepare_decoder(config, params, self.dtype)

    def cache_dtype(self, prepared: PreparedDecoder) -> np.dtype[Any]:
        """Return the number type that everything is computed in."""
        return self.dtype

    def forward(
        self, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView], observe: Observer | None = None
    ) -> Array:
        """Run the layers and return `hidden [tokens, dim]`, after the final norm."""
        positions = batch.positions()
        x = self._embed(prepared, batch, positions, observe, None)
        run = Pass.of(prepared, batch, caches, x, rotary_tables(prepared, batch, positions, self.dtype))
        for index in range(len(prepared.layers)):
            self._layer(run, index, within(observe, f"layers.{index}."))
        return self._finish(run, observe)

    def forward_saving(
        self, prepared: PreparedDecoder, batch: Batch, saved: dict[str, Array], recompute: bool = False
    ) -> Array:
        """Like `forward` on whole sequences; keeps in `saved` what `backward` needs.

        With recompute that is no more than what enters each layer: `backward` runs the layers again, one at a time.
        """
        positions = batch.positions()
        tables = rotary_tables(prepared, batch, positions, self.dtype)
        saved |= {"token_ids": batch.token_ids, "starts": batch.starts, "positions": positions}
        for number, (cos, signed_sin) in enumerate(tables):
            saved |= {f"rotary.{number}.cos": cos, f"rotary.{number}.signed_sin": signed_sin}
        if batch.adapters is not None:
            saved["adapters"] = np.array(batch.adapters, np.object_)
        x = self._embed(prepared, batch, positions, None, saved)
        run = Pass.of(prepared, batch, self._scratch(prepared, batch), x, tables)
        for index in range(len(prepared.layers)):
            if recompute:
                saved[f"layers.{index}.attention_in"] = run.x.copy()
            else:
                run.kept = {}
            self._layer(run, index, None)
            saved |= {f"layers.{index}.{name}": array for name, array in (run.kept or {}).items()}
        if prepared.final_norm is not None:
            saved["final_in"] = run.x.copy()
        return self._finish(run, None)

    def backward(
        self,
        prepared: PreparedDecoder,
        saved: dict[str, Array],
        dhidden: Array,
        wanted: Collection[str] | None = None,
    ) -> dict[str, Array]:
        """Return the wanted gradients given `dhidden [tokens, dim]`; see the contract."""
        return backward_pass(self, prepared, saved, dhidden, wanted, partial(self._rerun, prepared, saved))

    def head_backward(self, prepared: PreparedDecoder, hidden: Array, dlogits: Array, grads: dict[str, Array]) -> Array:
        """Return `dhidden [rows, dim]` and add the gradients of what lies behind hidden to grads."""
        return head_backward(self, prepared, hidden, dlogits, grads)

    def parameters(self, prepared: PreparedDecoder) -> dict[str, Array]:
        """Return the canonical parameters as they are multiplied with, as views: writing to them changes the model.

        Norm scales that are stored minus one are here plus one.
        """
        return parameter_views(prepared)

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function: they all are NumPy's."""
        return function

    def head(self, prepared: PreparedDecoder, hidden: Array, observe: Observer | None = None) -> Array:
        """Return `logits [rows, vocab]` of `hidden [rows, dim]`."""
        config = prepared.config
        if prepared.embedding_out is not None:
            narrow = np.empty((len(hidden), config.embedding_width), self.dtype)
            hidden = self.linear(hidden, prepared.embedding_out, narrow)
            show(observe, "embedding_out", hidden)
        logits = np.empty((len(hidden), config.vocab_size), self.dtype)
        self.linear(hidden, prepared.head, logits)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.logit_softcap is not None:
            ops.softcap_forward(logits, config.logit_softcap, out=logits)
        show(observe, "logits", logits)
        return logits

    # ---- the forward pass -------------------------------------------------------------------------------------------

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
        show(observe, "embedding", x)
        if prepared.embedding_norm is not None:
            if saved is not None:
                saved["embedding_norm_in"] = x.copy()
            show(observe, "embedding_norm", self.norm(config, x, prepared.embedding_norm, x))
        if config.positions.kind not in ("learned", "sinusoidal"):
            return x
        if prepared.positions is not None:
            added = prepared.positions[positions + config.positions.offset]
        else:
            added = ops.sinusoidal_positions(positions, config.dim, self.dtype)
        show(observe, "positions", added)
        x += added
        show(observe, "embedding_with_positions", x)
        return x

    def _scratch(self, prepared: PreparedDecoder, batch: Batch) -> list[CacheView]:
        return [ScratchCache(prepared.config, self.dtype, length) for length in np.diff(batch.starts).tolist()]

    def _rerun(self, prepared: PreparedDecoder, saved: Mapping[str, Array], index: int, x: Array) -> dict[str, Array]:
        """Run one layer of a saving pass again, given what entered it, and return what it keeps."""
        starts, adapters = saved["starts"], tuple(saved["adapters"]) if "adapters" in saved else None
        batch = Batch(saved["token_ids"], starts, np.zeros(len(starts) - 1, np.int64), adapters=adapters)
        numbers = range(len(prepared.rotaries))
        tables = [(saved[f"rotary.{number}.cos"], saved[f"rotary.{number}.signed_sin"]) for number in numbers]
        run = Pass.of(prepared, batch, self._scratch(prepared, batch), x, tables)
        kept: dict[str, Array] = {}
        run.kept = kept
        self._layer(run, index, None)
        return kept

    def _layer(self, run: Pass, index: int, see: Observer | None) -> None:
        """Take the residual stream through one layer."""
        layer = run.prepared.layers[index]
        run.keep("attention_in", run.x)
        x = self._enter(run, layer.attention_norm, "attention", see)
        delta = self._attend(run, index, layer, x, see)
        if run.config.residual == "serial":
            self._leave(run, layer.attention_output_norm or layer.attention_norm, "attention", see, delta)
            run.keep("mlp_in", run.x)
            x = self._enter(run, layer.mlp_norm, "mlp", see)
        else:  # the feed-forward reads the stream as attention found it
            x = self._enter(run, layer.mlp_norm, "mlp", see) if layer.mlp_norm is not None else x
            self._leave(run, None, "attention", see, delta)
        delta = self._feed_forward(run, layer.mlp, x, see)
        self._leave(run, layer.mlp_output_norm or layer.mlp_norm, "mlp", see, delta)

    def _finish(self, run: Pass, observe: Observer | None) -> Array:
        norm = run.prepared.final_norm
        if norm is None:
            return run.x
        hidden = self.norm(run.config, run.x, norm, run.x)
        show(observe, "final_norm", hidden)
        return hidden

    def _enter(self, run: Pass, norm: Norm | None, name: str, see: Observer | None) -> Array:
        """Return what a sublayer reads: the residual stream, normalised when the norm stands before."""
        if norm is None or not run.config.norm.before:
            return run.x
        normed = self.norm(run.config, run.x, norm, run.normed)
        show(see, f"{name}_norm", normed)
        return normed

    def _leave(self, run: Pass, norm: Norm | None, name: str, see: Observer | None, delta: Array) -> None:
        """Add what a sublayer made to the residual stream, with the norm that stands behind, on either side of it."""
        config = run.config
        if config.norm.behind and norm is not None:
            run.keep(f"{name}_out", delta)
            show(see, f"{name}_output_norm", self.norm(config, delta, norm, delta))
        if config.residual_scale != 1.0:
            delta *= config.residual_scale
        if config.residual_from_norm:
            np.add(run.normed, delta, out=run.x)
        else:
            run.x += delta
        show(see, f"{name}_residual", run.x)
        if config.norm.place == "post" and norm is not None:
            run.keep(f"{name}_sum", run.x)
            show(see, f"{name}_norm", self.norm(config, run.x, norm, run.x))

    def _attend(self, run: Pass, index: int, layer: Layer, x: Array, see: Observer | None) -> Array:
        """Return the attention sublayer's output `[tokens, dim]` and store the new keys and values."""
        self._project(x, layer.qkv, run.qkv, run.adapters)
        clip = run.config.attention.clip_qkv
        if clip is not None:
            np.clip(run.qkv, -clip, clip, out=run.qkv)
        show_qkv(see, run, "")
        if clip is not None or layer.q_norm is not None:
            run.keep("qkv_in", run.qkv)  # from which the rest follows cheaply
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(run, layer.q_norm, layer.k_norm)
            show_qkv(see, run, "_normed")
        if layer.rotary_id is not None:
            self.rotary(*run.turns[layer.rotary_id])
            show_qkv(see, run, "_rotated")
        if clip is None and layer.q_norm is None:
            run.keep("qkv", run.qkv)
        run.heads = run.to_keep("heads", run.heads)
        self._attend_each(run, index, layer.scoring, within(see, "attention."))
        show(see, "attention.heads", run.heads)
        projected = self._project(run.heads, layer.out, run.delta, run.adapters)
        show(see, "attention.projection", projected)
        return projected

    def _project(self, x: Array, linear: Linear, out: Array, adapters: RowAdapters | None) -> Array:
        """Fill out `[rows, out]` like `linear`, and add what the rows' adapters change."""
        self.linear(x, linear, out)
        if adapters is not None:
            for delta in adapters.deltas(linear):
                out[delta.rows, delta.columns] += self._low_rank(x[delta.rows], delta.low_rank)
        return out

    def _low_rank(self, x: Array, low_rank: LowRank) -> Array:
        """Return scale * (x @ a.T) @ b.T `[rows, out]` of x `[rows, in]`, made of the same products as any linear."""
        narrow = self.linear(x, Linear(low_rank.a, None), np.empty((len(x), len(low_rank.a)), self.dtype))
        narrow *= low_rank.scale
        return self.linear(narrow, Linear(low_rank.b, None), np.empty((len(x), len(low_rank.b)), self.dtype))

    def _norm_heads(self, run: Pass, q_norm: Norm, k_norm: Norm) -> None:
        """Normalise queries and keys in place: head by head, or all of a token's heads as one vector."""
        attention = run.config.attention
        query_width = attention.num_heads * attention.head_dim
        key_end = query_width + attention.num_kv_heads * attention.head_dim
        for norm, columns in ((q_norm, slice(0, query_width)), (k_norm, slice(query_width, key_end))):
            x = run.qkv[:, columns]
            if attention.qk_norm != "whole":
                x = x.reshape(len(x), -1, attention.head_dim)  # a view: only the last axis is cut
            self.norm(run.config, x, norm, x)

    def _attend_each(self, run: Pass, index: int, scoring: Scoring, see: Observer | None) -> None:
        """Let every sequence attend over its own cache."""
        out = run.heads.reshape(run.q.shape)
        starts = run.batch.starts.tolist()
        for cache, start, stop in zip(run.caches, starts, starts[1:], strict=False):
            length = cache.length
            keys, values = cache.layer(index)
            keys[:, length : length + stop - start] = run.k[:, start:stop]
            values[:, length : length + stop - start] = run.v[:, start:stop]
            self.attention(run.q[start:stop], keys, values, length, scoring, out[start:stop], see)

    def _feed_forward(self, run: Pass, mlp: Mlp | Experts, x: Array, see: Observer | None) -> Array:
        """Return the feed-forward sublayer's output `[tokens, dim]`."""
        if isinstance(mlp, Experts):
            out = self._mix_experts(run, mlp, x, see)
        else:
            keep = None if run.kept is None else run.keep
            if run.config.mlp.gated:  # what the activation makes then stands elsewhere
                run.up, keep = run.to_keep("up", run.up), None
            out = self._expand(run.config, mlp, x, run.up, run.delta, run.adapters, see, keep)
        show(see, "mlp.down", out)
        return out

    def _expand(
        self,
        config: DecoderConfig,
        mlp: Mlp,
        x: Array,
        up: Array,
        out: Array,
        adapters: RowAdapters | None,
        see: Observer | None = None,
        keep: Observer | None = None,
    ) -> Array:
        """Fill out `[rows, dim]` with one feed-forward of x `[rows, dim]`; `up` is room for its hidden layer."""
        self._project(x, mlp.up, up, adapters)
        if keep is not None:
            keep("up", up)
        if see is not None:
            hidden_dim = mlp.down.weight.shape[1]
            show(see, "mlp.up", up[:, -hidden_dim:])
            if config.mlp.gated:
                show(see, "mlp.gate", up[:, :hidden_dim])
        activated = self.activation(config, up)
        if see is not None:
            show(see, "mlp.activated", activated)
        return self._project(activated, mlp.down, out, adapters)

    def _mix_experts(self, run: Pass, experts: Experts, x: Array, see: Observer | None) -> Array:
        """Return the weighted sum of the experts that each token goes to; no other expert computes anything."""
        config = run.config
        scores = self.linear(x, experts.router, np.empty((len(x), len(experts.each)), self.dtype))
        run.keep("router", scores)
        show(see, "mlp.router", scores)
        ids, weights = moe.route_forward(scores, experts.config)
        show(see, "mlp.expert_ids", ids)
        show(see, "mlp.expert_weights", weights)
        run.delta[...] = 0
        for expert, rows, share in moe.rows_by_expert(ids, weights):
            adapters = None if run.adapters is None else run.adapters.at(rows)
            run.delta[rows] += self._apply_expert(config, experts.each[expert], x[rows], adapters) * share
        if experts.shared is not None:
            shared = self._apply_expert(config, experts.shared, x, run.adapters)
            if experts.shared_gate is not None:
                gate = self.linear(x, experts.shared_gate, np.empty((len(x), 1), self.dtype))
                shared *= ops.sigmoid_forward(gate, out=gate)
            show(see, "mlp.shared", shared)
            run.delta += shared
        return run.delta

    def _apply_expert(self, config: DecoderConfig, mlp: Mlp, x: Array, adapters: RowAdapters | None) -> Array:
        up = np.empty((len(x), len(mlp.up.weight)), self.dtype)
        return self._expand(config, mlp, x, up, np.empty((len(x), config.dim), self.dtype), adapters)
