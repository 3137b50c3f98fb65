"""The backward pass of every family: `NumpyBackend`'s forward pass, read from its end to its start.

What the forward pass keeps (`layers.N.` before the names of a layer):

    token_ids, starts, positions [tokens] or [sequences + 1]    rotary.R.{cos,signed_sin}
    adapters [sequences] objects               where a sequence has one
    embedding_norm_in [tokens, dim]            the embedding, where it is normalised
    attention_in, mlp_in [tokens, dim]         the residual stream that a sublayer reads, before its norm; once where
                                               both read the same
    attention_out, mlp_out [tokens, dim]       what a sublayer made, where a norm stands behind it
    attention_sum, mlp_sum [tokens, dim]       the stream after the addition, where a norm stands there
    qkv [tokens, (heads + 2 kv_heads) * head_dim]    as the scores are made from it, or where it was clipped or
    qkv_in                                           normalised as it was before its norms and rotary
    heads [tokens, heads * head_dim]           what attention made
    up [tokens, hidden or 2 * hidden]          before the activation; of experts worked out again
    router [tokens, experts]                   the router's scores
    final_in [tokens, dim]                     before the final norm

Everything else is worked out again: norms, activations and attention weights cost less than their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.model import moe, ops, ops_backward
from treadle_server.model.adapters import RowAdapters
from treadle_server.model.backward_state import BackwardState
from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder
from treadle_server.model.primitives import Primitives


def backward_pass(
    primitives: Primitives,
    prepared: PreparedDecoder,
    saved: dict[str, Array],
    dhidden: Array,
    wanted: Collection[str] | None,
    rerun: Callable[[int, Array], dict[str, Array]],
) -> dict[str, Array]:
    """Return the wanted gradients given `dhidden [tokens, dim]`, of all parameters when wanted is None.

    What a layer kept is dropped as soon as the layer is through. Where it kept nothing but `attention_in`, `rerun`
    takes the layer's number and that, and returns what the layer keeps.
    """
    run = BackwardState(primitives, prepared, saved, wanted)
    first_layer, dx = run.first_layer(), dhidden
    if prepared.final_norm is not None:
        dx = run.norm(prepared.final_norm, saved.pop("final_in"), dx)
    for index in range(len(prepared.layers) - 1, max(first_layer, 0) - 1, -1):
        kept = _take(saved, f"layers.{index}.")
        if "heads" not in kept:
            kept = rerun(index, kept["attention_in"])
        dx = _LayerBackward(run, index, kept).run(dx)
    if first_layer < 0:
        _embedding_backward(run, dx)
    saved.clear()
    return run.gradients()


def _take(saved: dict[str, Array], prefix: str) -> dict[str, Array]:
    names = [name for name in saved if name.startswith(prefix)]
    return {name.removeprefix(prefix): saved.pop(name) for name in names}


def head_backward(
    primitives: Primitives, prepared: PreparedDecoder, hidden: Array, dlogits: Array, grads: dict[str, Array]
) -> Array:
    """Return `dhidden [rows, dim]` given `dlogits [rows, vocab]`, and add to those of grads, of canonical names."""
    config, head, embedding_out = prepared.config, prepared.head, prepared.embedding_out
    narrow = hidden if embedding_out is None else ops.linear_forward(hidden, embedding_out.weight)
    if config.logit_softcap is not None:
        logits = ops.linear_forward(narrow, head.weight, head.bias)
        logits *= config.logit_scale
        ops.softcap_forward(logits, config.logit_softcap, out=logits)
        dlogits = ops_backward.softcap_backward(logits, config.logit_softcap, dlogits)
    if config.logit_scale != 1.0:
        dlogits = dlogits * config.logit_scale
    matrix = "embedding.weight" if config.tied_head else "head.weight"
    if matrix in grads:
        primitives.add_weight_backward(narrow, dlogits, grads[matrix])
    if "head.bias" in grads:
        grads["head.bias"] += ops_backward.linear_bias_backward(dlogits)
    dnarrow = primitives.linear_backward(head, dlogits)
    if embedding_out is None:
        return dnarrow
    if "embedding_out.weight" in grads:
        primitives.add_weight_backward(hidden, dnarrow, grads["embedding_out.weight"])
    return primitives.linear_backward(embedding_out, dnarrow)


class _LayerBackward:
    """One layer: `run` takes the gradient of what leaves it to that of what entered it, both `[tokens, dim]`."""

    def __init__(self, run: BackwardState, index: int, kept: dict[str, Array]) -> None:
        self._run = run
        self._config = run.config
        self._layer: Layer = run.prepared.layers[index]
        self._kept = kept

    def run(self, dx: Array) -> Array:
        return self._serial(dx) if self._config.residual == "serial" else self._parallel(dx)

    def _serial(self, dx: Array) -> Array:
        layer = self._layer
        for name, norm, output_norm, backward in (
            ("mlp", layer.mlp_norm, layer.mlp_output_norm, self._feed_forward),
            ("attention", layer.attention_norm, layer.attention_output_norm, self._attend),
        ):
            dx, ddelta = self._leave(name, norm, output_norm, dx)
            x = self._kept[f"{name}_in"]
            dread = backward(self._run.normed(norm, x), ddelta)
            if self._config.residual_from_norm:  # the sum was made with what the sublayer read
                dx = self._enter(norm, x, dread + dx)
            else:
                entered = self._enter(norm, x, dread)
                dx = np.add(dx, entered, out=entered)
        return dx

    def _parallel(self, dx: Array) -> Array:
        """Both sublayers read the stream as it entered, through one norm or through two."""
        layer, run = self._layer, self._run
        x = self._kept["attention_in"]
        ddelta = dx * self._config.residual_scale
        dread = self._attend(run.normed(layer.attention_norm, x), ddelta)
        if layer.mlp_norm is None:
            dread += self._feed_forward(run.normed(layer.attention_norm, x), ddelta)
        else:
            dmlp_read = self._feed_forward(run.normed(layer.mlp_norm, x), ddelta)
            dx = dx + self._enter(layer.mlp_norm, x, dmlp_read)
        return dx + self._enter(layer.attention_norm, x, dread)

    def _leave(self, name: str, norm: Norm | None, output_norm: Norm | None, dx: Array) -> tuple[Array, Array]:
        """Return the gradients of the stream that was added to and of what the sublayer made."""
        if self._config.norm.place == "post" and norm is not None:
            dx = self._run.norm(norm, self._kept[f"{name}_sum"], dx)
        ddelta = dx if self._config.residual_scale == 1.0 else dx * self._config.residual_scale
        if output_norm is not None:
            made = self._kept[f"{name}_out"]
            ddelta = self._run.norm(output_norm, made, ddelta)
        return dx, ddelta

    def _enter(self, norm: Norm | None, x: Array, dread: Array) -> Array:
        if norm is None or not self._config.norm.before:
            return dread
        return self._run.norm(norm, x, dread)

    # ---- attention --------------------------------------------------------------------------------------------------

    def _attend(self, x: Array, ddelta: Array) -> Array:
        """Return the gradient of what attention read, x `[tokens, dim]`."""
        run, layer, attention = self._run, self._layer, self._config.attention
        dheads = run.linear(layer.out, self._kept["heads"], ddelta, run.adapters)
        scored, heads = self._scored_qkv(), self._kept["heads"]
        dqkv = run.primitives.attention_backward(attention, layer.scoring, run.saved["starts"], scored, heads, dheads)
        if layer.rotary_id is not None:
            pairs, cos, signed_sin = self._turning(layer.rotary_id, dqkv)
            run.primitives.rotary_backward(pairs, cos, signed_sin)
        flat = dqkv.reshape(len(x), -1)
        for norm, columns in self._head_norms():
            dy = self._by_norm(flat, columns)
            dy[...] = run.norm(norm, self._by_norm(self._kept["qkv_in"], columns), dy)
        if attention.clip_qkv is not None:
            flat *= np.abs(self._kept["qkv_in"]) < attention.clip_qkv
        return run.linear(layer.qkv, x, flat, run.adapters)

    def _turning(self, rotary_id: int, qkv: Array) -> tuple[Array, Array, Array]:
        """Return what turns of `[tokens, heads + 2 kv_heads, head_dim]`, as a view, and the angles' cos and sin."""
        attention, saved = self._config.attention, self._run.saved
        pairs = self._run.prepared.rotaries[rotary_id].pairs(qkv[:, : attention.num_heads + attention.num_kv_heads])
        return pairs, saved[f"rotary.{rotary_id}.cos"], saved[f"rotary.{rotary_id}.signed_sin"]

    def _scored_qkv(self) -> Array:
        """Return `[tokens, heads + 2 kv_heads, head_dim]` as the scores were made from it."""
        head_dim = self._config.attention.head_dim
        if "qkv" in self._kept:
            return self._kept["qkv"].reshape(len(self._kept["qkv"]), -1, head_dim)
        qkv = self._kept["qkv_in"].copy()
        for norm, columns in self._head_norms():
            heads = self._by_norm(qkv, columns)
            self._run.primitives.norm(self._config, heads, norm, heads)
        qkv = qkv.reshape(len(qkv), -1, head_dim)
        if self._layer.rotary_id is not None:
            pairs, cos, signed_sin = self._turning(self._layer.rotary_id, qkv)
            self._run.primitives.rotary(pairs, cos, signed_sin)
        return qkv

    def _head_norms(self) -> Iterator[tuple[Norm, slice]]:
        """Yield the norms of queries and keys, and whose columns they are."""
        attention, layer = self._config.attention, self._layer
        query_width = attention.num_heads * attention.head_dim
        key_end = query_width + attention.num_kv_heads * attention.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            yield layer.q_norm, slice(0, query_width)
            yield layer.k_norm, slice(query_width, key_end)

    def _by_norm(self, qkv: Array, columns: slice) -> Array:
        """Return columns of qkv as their norm sees them: head by head, or all of a token's heads as one vector."""
        x = qkv[:, columns]
        attention = self._config.attention
        return x if attention.qk_norm == "whole" else x.reshape(len(x), -1, attention.head_dim)

    # ---- feed-forward -----------------------------------------------------------------------------------------------

    def _feed_forward(self, x: Array, ddelta: Array) -> Array:
        """Return the gradient of what the feed-forward read, x `[tokens, dim]`."""
        mlp = self._layer.mlp
        if isinstance(mlp, Experts):
            return self._mix_experts(mlp, x, ddelta)
        return self._expand(mlp, x, self._kept["up"], ddelta, self._run.adapters)[0]

    def _expand(
        self,
        mlp: Mlp,
        x: Array,
        up: Array,
        ddown: Array,
        adapters: RowAdapters | None,
        share: Array | None = None,
    ) -> tuple[Array, Array | None]:
        """Return dx of one feed-forward whose output was multiplied by share `[rows, 1]`, and dshare `[rows, 1]`."""
        hidden, slopes = self._run.primitives.activation_again(self._config, up)
        dhidden = self._run.linear(mlp.down, hidden, ddown, adapters, share)
        dshare = None
        if share is not None:  # what sum(ddown * output) is, the output not worked out again
            dshare = np.einsum("rh,rh->r", hidden, dhidden)[:, None]
            dhidden *= share
        dup = self._run.primitives.activation_backward(self._config, slopes, dhidden)
        return self._run.linear(mlp.up, x, dup, adapters), dshare

    def _mix_experts(self, experts: Experts, x: Array, ddelta: Array) -> Array:
        run, scores = self._run, self._kept["router"]
        ids, weights = moe.route_forward(scores, experts.config)
        dweights, dx = np.zeros_like(weights), np.zeros_like(x)
        for expert in np.unique(ids).tolist():
            rows, slots = np.nonzero(ids == expert)
            mlp, adapters = experts.each[expert], None if run.adapters is None else run.adapters.at(rows)
            up = run.linear_forward(mlp.up, x[rows], adapters)
            share = weights[rows, slots, None]
            dread, dshare = self._expand(mlp, x[rows], up, ddelta[rows], adapters, share)
            dx[rows] += dread
            dweights[rows, slots] = 0 if dshare is None else dshare[:, 0]
        dscores = moe.route_backward(scores, ids, experts.config, weights, dweights)
        dx += run.linear(experts.router, x, dscores, None)
        if experts.shared is not None:
            dx += self._share(experts.shared, experts.shared_gate, x, ddelta)
        return dx

    def _share(self, shared: Mlp, shared_gate: Linear | None, x: Array, ddelta: Array) -> Array:
        """Return dx of the expert that sees every token, and of its gate."""
        run, gate = self._run, None
        up = run.linear_forward(shared.up, x, run.adapters)
        if shared_gate is not None:
            gate = ops.sigmoid_forward(run.linear_forward(shared_gate, x, None))
        dx, dgate = self._expand(shared, x, up, ddelta, run.adapters, gate)
        if shared_gate is not None and gate is not None and dgate is not None:
            dx += run.linear(shared_gate, x, ops_backward.sigmoid_backward(gate, dgate), None)
        return dx


def _embedding_backward(run: BackwardState, dx: Array) -> None:
    """Bring the gradient of the stream's start, `[tokens, dim]`, to the embedding and the learned positions."""
    prepared, config, saved = run.prepared, run.config, run.saved
    if prepared.positions is not None and run.wants("positions.weight"):
        dpositions = np.zeros_like(prepared.positions)
        ops_backward.embedding_backward(saved["positions"] + config.positions.offset, dx, dpositions)
        run.add([("positions.weight", dpositions)])
    if prepared.embedding_norm is not None:
        dx = run.norm(prepared.embedding_norm, saved["embedding_norm_in"], dx)
    if prepared.embedding_in is not None:
        wide = prepared.embedding[saved["token_ids"]] * config.embedding_scale
        dx = run.linear(prepared.embedding_in, wide.astype(dx.dtype, copy=False), dx, None)
    if run.wants("embedding.weight"):
        dembedding = np.zeros_like(prepared.embedding)
        ops_backward.embedding_backward(saved["token_ids"], dx * config.embedding_scale, dembedding)
        run.add([("embedding.weight", dembedding)])
