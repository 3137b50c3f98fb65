"""The canonical parameters of a decoder: their names and shapes follow from its DecoderConfig.

They are the finest there are, each matrix `[out, in]` (N layer, E expert, H head, all from 0):

    embedding.weight [vocab, width]                     embedding_in.weight, embedding_out.weight
    embedding_norm.{weight,bias}                        positions.weight [offset + context, dim]
    layers.N.{attention_norm,mlp_norm}.{weight,bias}    layers.N.{attention_output_norm,mlp_output_norm}.{weight,bias}
    layers.N.attention.{q,k,v,o}.{weight,bias}          layers.N.attention.{q_norm,k_norm}[.H].{weight,bias}
    layers.N.mlp.{gate,up,down}.{weight,bias}           layers.N.mlp.router.weight [experts, dim]
    layers.N.mlp.experts.E.{gate,up,down}.weight        layers.N.mlp.shared.{gate,up,down}.weight
    layers.N.mlp.shared_gate.weight [1, dim]            final_norm.{weight,bias}
    head.{weight,bias}
"""

from __future__ import annotations

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MoeConfig

Shape = tuple[int, ...]


def param_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shape of every canonical parameter of a config, in the order of the forward pass."""
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab_size, config.embedding_width)}
    if config.embedding_dim is not None:
        shapes["embedding_in.weight"] = (config.dim, config.embedding_width)
    if config.embedding_norm:
        shapes |= _norm_shapes("embedding_norm", config)
    if config.positions.kind == "learned":
        shapes["positions.weight"] = (config.positions.offset + config.context_length, config.dim)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"layers.{layer}.{name}"] = shape
    if config.has_final_norm:
        shapes |= _norm_shapes("final_norm", config)
    if config.embedding_dim is not None:
        shapes["embedding_out.weight"] = (config.embedding_width, config.dim)
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, config.embedding_width)
    if config.head_bias:
        shapes["head.bias"] = (config.vocab_size,)
    return shapes


def _layer_shapes(config: DecoderConfig, layer: int) -> dict[str, Shape]:
    norm = config.norm
    before, behind = norm.place != "output", norm.behind
    shapes = _norm_shapes("attention_norm", config) if before else {}
    shapes |= _attention_shapes(config)
    shapes |= _norm_shapes("attention_output_norm", config) if behind else {}
    shapes |= _norm_shapes("mlp_norm", config) if before and config.residual != "parallel_shared" else {}
    moe = config.moe_of(layer)
    shapes |= _mlp_shapes("mlp.", config, config.mlp.hidden_dim, config.mlp.bias) if moe is None else {}
    shapes |= {} if moe is None else _moe_shapes(config, moe)
    return shapes | (_norm_shapes("mlp_output_norm", config) if behind else {})


def _attention_shapes(config: DecoderConfig) -> dict[str, Shape]:
    attention, dim = config.attention, config.dim
    query_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    shapes: dict[str, Shape] = {}
    for name, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes |= _linear_shapes(f"attention.{name}", rows, dim, bias=attention.qkv_bias)
    shapes |= _qk_norm_shapes("attention.q_norm", attention, attention.num_heads)
    shapes |= _qk_norm_shapes("attention.k_norm", attention, attention.num_kv_heads)
    return shapes | _linear_shapes("attention.o", dim, query_rows, bias=attention.out_bias)


def _qk_norm_shapes(name: str, attention: AttentionConfig, num_heads: int) -> dict[str, Shape]:
    if attention.qk_norm == "none":
        return {}
    width = attention.head_dim * (num_heads if attention.qk_norm == "whole" else 1)
    names = [f"{name}.{head}" for head in range(num_heads)] if attention.qk_norm == "each_head" else [name]
    parts = ("weight", "bias") if attention.qk_norm_bias else ("weight",)
    return {f"{one}.{part}": (width,) for one in names for part in parts}


def _moe_shapes(config: DecoderConfig, moe: MoeConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mlp.router.weight": (moe.num_experts, config.dim)}
    for expert in range(moe.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", config, moe.hidden_dim, bias=False)
    if moe.shared_dim:
        shapes |= _mlp_shapes("mlp.shared.", config, moe.shared_dim, bias=False)
    if moe.shared_gate:
        shapes["mlp.shared_gate.weight"] = (1, config.dim)
    return shapes


def _mlp_shapes(prefix: str, config: DecoderConfig, hidden_dim: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name in ("gate", "up") if config.mlp.gated else ("up",):
        shapes |= _linear_shapes(prefix + name, hidden_dim, config.dim, bias=bias)
    return shapes | _linear_shapes(f"{prefix}down", config.dim, hidden_dim, bias=bias)


def _norm_shapes(name: str, config: DecoderConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.dim,)} if config.norm.scale else {}
    return shapes | ({f"{name}.bias": (config.dim,)} if config.norm.bias else {})


def _linear_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if bias else {})
