"""The backward pass of every family: `NumpyBackend`'s forward pass, read from its end to its start.

What the forward pass keeps (`layers.N.` before the names of a layer):

    token_ids, starts, positions [tokens] or [sequences + 1]    rotary.R.{cos,signed_sin}
    embedding_norm_in [tokens, dim]            the embedding, where it is normalised
    attention_in, mlp_in [tokens, dim]         the residual stream that a sublayer reads, before its norm
    attention_out, mlp_out [tokens, dim]       what a sublayer made, where a norm stands behind it
    attention_sum, mlp_sum [tokens, dim]       the stream after the addition, where a norm stands there
    qkv_in, qkv [tokens, (heads + 2 kv_heads) * head_dim]    before the norms of heads (where clipped or normalised);
                                               as the scores are made from it
    heads [tokens, heads * head_dim]           what attention made
    up [tokens, hidden or 2 * hidden]          before the activation; of experts worked out again
    router [tokens, experts]                   the router's scores
    final_in [tokens, dim]                     before the final norm

Everything else is worked out again: norms, activations and attention weights cost less than their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model import moe, ops, ops_backward
from treadle_server.model.activations import ACTIVATIONS, ACTIVATIONS_BACKWARD
from treadle_server.model.attention import attention_backward
from treadle_server.model.fused import fused_arrays, split_fused
from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder
from treadle_server.model.rotary import rotary_backward


def backward_pass(prepared: PreparedDecoder, saved: Mapping[str, Array], dhidden: Array) -> dict[str, Array]:
    """Return the gradient of every canonical parameter given `dhidden [tokens, dim]`."""
    run = _Run(prepared.config, prepared, saved)
    dx = dhidden
    if prepared.final_norm is not None:
        dx = run.norm("final_norm", prepared.final_norm, saved["final_in"], dx)
    for index in range(len(prepared.layers) - 1, -1, -1):
        dx = _LayerBackward(run, index).run(dx)
    _embedding_backward(run, dx)
    for name, array in fused_arrays(prepared).items():
        if name not in run.grads:
            run.grads[name] = np.zeros_like(array)
    return split_fused(prepared.config, run.grads)


def head_backward(prepared: PreparedDecoder, hidden: Array, dlogits: Array, grads: dict[str, Array]) -> Array:
    """Return `dhidden [rows, dim]` given `dlogits [rows, vocab]`, and add to grads of canonical names."""
    config = prepared.config
    narrow = hidden
    if prepared.embedding_out is not None:
        narrow = ops.linear_forward(hidden, prepared.embedding_out.weight)
    if config.logit_softcap is not None:
        logits = ops.linear_forward(narrow, prepared.head.weight, prepared.head.bias)
        logits *= config.logit_scale
        ops.softcap_forward(logits, config.logit_softcap, out=logits)
        dlogits = ops_backward.softcap_backward(logits, config.logit_softcap, dlogits)
    if config.logit_scale != 1.0:
        dlogits = dlogits * config.logit_scale
    dnarrow, dweight, dbias = ops_backward.linear_backward(narrow, prepared.head.weight, dlogits)
    grads["embedding.weight" if config.tied_head else "head.weight"] += dweight
    if prepared.head.bias is not None:
        grads["head.bias"] += dbias
    if prepared.embedding_out is None:
        return dnarrow
    dhidden, dweight, _ = ops_backward.linear_backward(hidden, prepared.embedding_out.weight, dnarrow)
    grads["embedding_out.weight"] += dweight
    return dhidden


@dataclass(frozen=True, slots=True)
class _Run:
    """One backward pass; gradients gather under the names of `fused_arrays`."""

    config: DecoderConfig
    prepared: PreparedDecoder
    saved: Mapping[str, Array]
    grads: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, gradient: Array | None) -> None:
        """Add to a gradient; one that is asked for twice belongs to a norm that two sublayers read through."""
        if gradient is not None:
            self.grads[name] = self.grads[name] + gradient if name in self.grads else gradient

    def linear(self, name: str, linear: Linear, x: Array, dy: Array, share: Array | None = None) -> Array:
        """Return dx `[rows, in]` of dy `[rows, out]`; the parameters' gradients take share `[rows, 1]` of each row."""
        dx, dweight, dbias = ops_backward.linear_backward(x, linear.weight, dy, share)
        self.add(f"{name}.weight", dweight)
        self.add(f"{name}.bias", None if linear.bias is None else dbias)
        return dx

    def norm(self, name: str, norm: Norm, x: Array, dy: Array) -> Array:
        """Return dx `[..., dim]` of dy `[..., dim]`."""
        eps = self.config.norm.eps
        if self.config.norm.kind == "rms":
            dx, dweight = ops_backward.rms_norm_backward(x, norm.weight, eps, dy)
            dbias = None
        else:
            dx, dweight, dbias = ops_backward.layer_norm_backward(x, norm.weight, norm.bias, eps, dy)
        self.add(f"{name}.weight", dweight)
        self.add(f"{name}.bias", dbias)
        return dx

    def normed(self, norm: Norm | None, x: Array) -> Array:
        """Work out again what a sublayer read."""
        if norm is None or not self.config.norm.before:
            return x
        if self.config.norm.kind == "rms":
            return ops.rms_norm_forward(x, norm.weight, self.config.norm.eps)
        return ops.layer_norm_forward(x, norm.weight, norm.bias, self.config.norm.eps)


class _LayerBackward:
    """One layer: `run` takes the gradient of what leaves it to that of what entered it, both `[tokens, dim]`."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run = run
        self._config = run.config
        self._layer: Layer = run.prepared.layers[index]
        self._prefix = f"layers.{index}."

    def run(self, dx: Array) -> Array:
        return self._serial(dx) if self._config.residual == "serial" else self._parallel(dx)

    def _serial(self, dx: Array) -> Array:
        layer = self._layer
        for name, norm, output_norm, backward in (
            ("mlp", layer.mlp_norm, layer.mlp_output_norm, self._feed_forward),
            ("attention", layer.attention_norm, layer.attention_output_norm, self._attend),
        ):
            dx, ddelta = self._leave(name, norm, output_norm, dx)
            x = self._saved(f"{name}_in")
            dread = backward(self._run.normed(norm, x), ddelta)
            if self._config.residual_from_norm:  # the sum was made with what the sublayer read
                dx = self._enter(name, norm, x, dread + dx)
            else:
                dx = dx + self._enter(name, norm, x, dread)
        return dx

    def _parallel(self, dx: Array) -> Array:
        """Both sublayers read the stream as it entered, through one norm or through two."""
        layer, run = self._layer, self._run
        x = self._saved("attention_in")
        ddelta = dx * self._config.residual_scale
        dread = self._attend(run.normed(layer.attention_norm, x), ddelta)
        if layer.mlp_norm is None:
            dread += self._feed_forward(run.normed(layer.attention_norm, x), ddelta)
        else:
            dmlp_read = self._feed_forward(run.normed(layer.mlp_norm, x), ddelta)
            dx = dx + self._enter("mlp", layer.mlp_norm, x, dmlp_read)
        return dx + self._enter("attention", layer.attention_norm, x, dread)

    def _saved(self, name: str) -> Array:
        return self._run.saved[self._prefix + name]

    def _leave(self, name: str, norm: Norm | None, output_norm: Norm | None, dx: Array) -> tuple[Array, Array]:
        """Return the gradients of the stream that was added to and of what the sublayer made."""
        if self._config.norm.place == "post" and norm is not None:
            dx = self._run.norm(f"{self._prefix}{name}_norm", norm, self._saved(f"{name}_sum"), dx)
        ddelta = dx * self._config.residual_scale
        if output_norm is not None:
            made = self._saved(f"{name}_out")
            ddelta = self._run.norm(f"{self._prefix}{name}_output_norm", output_norm, made, ddelta)
        return dx, ddelta

    def _enter(self, name: str, norm: Norm | None, x: Array, dread: Array) -> Array:
        if norm is None or not self._config.norm.before:
            return dread
        return self._run.norm(f"{self._prefix}{name}_norm", norm, x, dread)

    # ---- attention --------------------------------------------------------------------------------------------------

    def _attend(self, x: Array, ddelta: Array) -> Array:
        """Return the gradient of what attention read, x `[tokens, dim]`."""
        layer, attention = self._layer, self._config.attention
        dheads = self._run.linear(f"{self._prefix}attention.o", layer.out, self._saved("heads"), ddelta)
        dqkv = self._attend_each(dheads)  # [tokens, heads + 2 kv_heads, head_dim]
        if layer.rotary_id is not None:
            cos, signed_sin = (self._run.saved[f"rotary.{layer.rotary_id}.{part}"] for part in ("cos", "signed_sin"))
            turned = dqkv[:, : attention.num_heads + attention.num_kv_heads]
            pairs = self._run.prepared.rotaries[layer.rotary_id].pairs(turned)
            rotary_backward(pairs, cos, signed_sin, out=pairs)
        flat = dqkv.reshape(len(x), -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(flat, layer.q_norm, layer.k_norm)
        if attention.clip_qkv is not None:
            flat *= np.abs(self._saved("qkv_in")) < attention.clip_qkv
        return self._run.linear(f"{self._prefix}attention.qkv", layer.qkv, x, flat)

    def _attend_each(self, dheads: Array) -> Array:
        """Return `[tokens, heads + 2 kv_heads, head_dim]` of dheads `[tokens, heads * head_dim]`."""
        attention = self._config.attention
        num_heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        qkv = self._saved("qkv").reshape(len(dheads), -1, head_dim)
        dqkv = np.empty_like(qkv)
        starts = self._run.saved["starts"].tolist()
        for start, stop in pairwise(starts):
            rows = slice(start, stop)
            by_group = (stop - start, kv_heads, attention.group_size, head_dim)
            dq, dk, dv = attention_backward(
                qkv[rows, :num_heads].reshape(by_group),
                qkv[rows, num_heads : num_heads + kv_heads].transpose(1, 0, 2),
                qkv[rows, num_heads + kv_heads :].transpose(1, 0, 2),
                self._layer.scoring,
                self._saved("heads")[rows].reshape(by_group),
                dheads[rows].reshape(by_group),
            )
            dqkv[rows, :num_heads] = dq.reshape(-1, num_heads, head_dim)
            dqkv[rows, num_heads : num_heads + kv_heads] = dk.transpose(1, 0, 2)
            dqkv[rows, num_heads + kv_heads :] = dv.transpose(1, 0, 2)
        return dqkv

    def _norm_heads(self, dqkv: Array, q_norm: Norm, k_norm: Norm) -> None:
        """Take the gradients of normalised queries and keys back through their norms, in place."""
        attention = self._config.attention
        query_width = attention.num_heads * attention.head_dim
        key_end = query_width + attention.num_kv_heads * attention.head_dim
        width = dqkv.shape[1] if attention.qk_norm == "whole" else attention.head_dim
        for name, norm, columns in (
            ("q_norm", q_norm, slice(0, query_width)),
            ("k_norm", k_norm, slice(query_width, key_end)),
        ):
            x, dy = self._saved("qkv_in")[:, columns], dqkv[:, columns]
            if attention.qk_norm != "whole":
                x, dy = x.reshape(len(x), -1, width), dy.reshape(len(x), -1, width)
            dx = self._run.norm(f"{self._prefix}attention.{name}", norm, x, dy)
            dqkv[:, columns] = dx.reshape(len(x), -1)

    # ---- feed-forward -----------------------------------------------------------------------------------------------

    def _feed_forward(self, x: Array, ddelta: Array) -> Array:
        """Return the gradient of what the feed-forward read, x `[tokens, dim]`."""
        mlp, name = self._layer.mlp, f"{self._prefix}mlp"
        if isinstance(mlp, Experts):
            return self._mix_experts(name, mlp, x, ddelta)
        return self._expand(name, mlp, x, self._saved("up"), ddelta)[0]

    def _expand(
        self, name: str, mlp: Mlp, x: Array, up: Array, ddown: Array, share: Array | None = None
    ) -> tuple[Array, Array | None]:
        """Return dx of one feed-forward whose output was multiplied by share `[rows, 1]`, and dshare `[rows, 1]`."""
        function = ACTIVATIONS[self._config.mlp.activation]
        hidden_dim = mlp.down.weight.shape[1]
        gate = up[:, :hidden_dim]
        activated = function(gate, None)
        hidden = activated * up[:, hidden_dim:] if self._config.mlp.gated else activated
        dhidden = self._run.linear(f"{name}.down", mlp.down, hidden, ddown, share)
        dshare = None
        if share is not None:  # what sum(ddown * output) is, the output not worked out again
            dshare = np.einsum("rh,rh->r", hidden, dhidden)[:, None]
            dhidden *= share
        dup = np.empty_like(up)
        if self._config.mlp.gated:
            np.multiply(dhidden, activated, out=dup[:, hidden_dim:])
            dhidden *= up[:, hidden_dim:]
        dup[:, :hidden_dim] = ACTIVATIONS_BACKWARD[self._config.mlp.activation](gate, dhidden)
        return self._run.linear(f"{name}.up", mlp.up, x, dup), dshare

    def _mix_experts(self, name: str, experts: Experts, x: Array, ddelta: Array) -> Array:
        scores = self._saved("router")
        ids, weights = moe.route_forward(scores, experts.config)
        dweights, dx = np.zeros_like(weights), np.zeros_like(x)
        for expert in np.unique(ids).tolist():
            rows, slots = np.nonzero(ids == expert)
            mlp = experts.each[expert]
            up = ops.linear_forward(x[rows], mlp.up.weight, mlp.up.bias)
            share = weights[rows, slots, None]
            dread, dshare = self._expand(f"{name}.experts.{expert}", mlp, x[rows], up, ddelta[rows], share)
            dx[rows] += dread
            dweights[rows, slots] = 0 if dshare is None else dshare[:, 0]
        dscores = moe.route_backward(scores, ids, experts.config, weights, dweights)
        dx += self._run.linear(f"{name}.router", experts.router, x, dscores)
        if experts.shared is not None:
            dx += self._share(name, experts.shared, experts.shared_gate, x, ddelta)
        return dx

    def _share(self, name: str, shared: Mlp, shared_gate: Linear | None, x: Array, ddelta: Array) -> Array:
        """Return dx of the expert that sees every token, and of its gate."""
        up = ops.linear_forward(x, shared.up.weight, shared.up.bias)
        gate = None
        if shared_gate is not None:
            gate = ops.sigmoid_forward(ops.linear_forward(x, shared_gate.weight, shared_gate.bias))
        dx, dgate = self._expand(f"{name}.shared", shared, x, up, ddelta, gate)
        if shared_gate is not None and gate is not None and dgate is not None:
            dscores = ops_backward.sigmoid_backward(gate, dgate)
            dx += self._run.linear(f"{name}.shared_gate", shared_gate, x, dscores)
        return dx


def _embedding_backward(run: _Run, dx: Array) -> None:
    """Bring the gradient of the stream's start, `[tokens, dim]`, to the embedding and the learned positions."""
    prepared, config, saved = run.prepared, run.config, run.saved
    if prepared.positions is not None:
        dpositions = np.zeros_like(prepared.positions)
        ops_backward.embedding_backward(saved["positions"] + config.positions.offset, dx, dpositions)
        run.add("positions.weight", dpositions)
    if prepared.embedding_norm is not None:
        dx = run.norm("embedding_norm", prepared.embedding_norm, saved["embedding_norm_in"], dx)
    if prepared.embedding_in is not None:
        wide = prepared.embedding[saved["token_ids"]] * config.embedding_scale
        dx = run.linear("embedding_in", prepared.embedding_in, wide.astype(dx.dtype, copy=False), dx)
    dembedding = np.zeros_like(prepared.embedding)
    ops_backward.embedding_backward(saved["token_ids"], dx * config.embedding_scale, dembedding)
    run.add("embedding.weight", dembedding)
