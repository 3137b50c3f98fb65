"""The reference models: what is special about each family, its config and its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ABSENT = object()
"""Marks a key that the older config file does not have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One reference model: its family, its config beyond SIZES, and what is special about its files.

    In `v4`, what the older config file says beyond the spelling, ABSENT removes a key; `rope_key` is how that file
    names the kind of rotary scaling; a `bare` folder is the base model's, whose tensor names have no prefix;
    `attention` is transformers' implementation; `gain` scales the matrices.
    """

    family: str
    config: Mapping[str, Any]
    v4: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_key: str = "rope_type"
    crosses_limit: bool = False
    bare: bool = False
    attention: str = "eager"
    gain: float = 1.3


def variant(family: str, *bases: Mapping[str, Any], files: Mapping[str, Any] | None = None, **config: Any) -> Variant:
    """Return a variant of which `files` are the fields beside the config."""
    merged = {key: value for base in (*bases, config) for key, value in base.items()}
    return Variant(family=family, config=merged, **(files or {}))


def rope(kind: str = "default", theta: float = 10000.0, **rest: Any) -> dict[str, Any]:
    """Return transformers 5's `rope_parameters`."""
    return {"rope_type": kind, "rope_theta": theta, **rest}


def llama(kind: str, *, max_positions: int = 128, **rest: Any) -> Variant:
    """Return a llama with one kind of rotary scaling; those of a length-dependent kind cross their limit of 16."""
    files = {"rope_key": "type" if kind in ("linear", "dynamic") else "rope_type"}
    files["crosses_limit"] = kind in ("dynamic", "longrope")
    sizes = {"head_dim": 16, "max_position_embeddings": max_positions}
    return variant("llama", GATED, sizes, files=files, rope_parameters=rope(kind, **rest))


GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
PLAIN = {"intermediate_size": 64}
WIDE = {"hidden_size": 64, "intermediate_size": 112}
EXPERTS = {**GATED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.7, 2.0, 2.4, 3.0],
    "long_factor": [1.0, 1.3, 2.0, 2.9, 4.0, 6.5, 9.0, 14.0],
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
GEMMA = {**GATED, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8}
GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = {"sliding_attention": rope(theta=1e4), "full_attention": rope("linear", 1e6, factor=8.0)}
FALCON_V4 = {"v4": {"ffn_hidden_size": ABSENT, "num_kv_heads": ABSENT}}
OPT = {"ffn_dim": 64}
OPT_V4 = {"v4": {"enable_bias": ABSENT, "layer_norm_elementwise_affine": ABSENT}}
BLOOM_V4 = {"hidden_size": ABSENT, "n_head": ABSENT, "n_embed": 32, "num_attention_heads": 4}
QWEN3_MOE_V4 = {"v4": {"num_local_experts": ABSENT, "num_experts": 6}}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

VARIANTS = {
    "opt": variant("opt", OPT, files=OPT_V4),
    "opt_post_norm": variant("opt", OPT, files=OPT_V4, do_layer_norm_before=False, activation_function="gelu"),
    "opt_projected": variant(
        "opt", OPT, files={**OPT_V4, "bare": True}, do_layer_norm_before=False, word_embed_proj_dim=20
    ),
    "opt_projected_pre_norm": variant("opt", OPT, UNTIED, word_embed_proj_dim=20),
    "opt_no_bias": variant(
        "opt", OPT, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"
    ),
    "opt_no_final_norm": variant("opt", OPT, files=OPT_V4, _remove_final_layer_norm=True),
    "bloom": variant("bloom", files={"v4": BLOOM_V4, "gain": 2.5}),
    "bloom_odd_heads": variant(
        "bloom",
        files={"bare": True},
        hidden_size=48,
        num_attention_heads=12,
        apply_residual_connection_post_layernorm=True,
    ),
    "falcon_7b": variant("falcon", files=FALCON_V4),
    "falcon_new": variant("falcon", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=64, bias=True),
    "falcon_new_one_norm": variant(
        "falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=64
    ),
    # 12 heads: some slopes are no powers of two, and falcon rounds its biases to bfloat16. Not with eager attention:
    # there transformers 5.24 adds the biases twice (in the mask and beside it). sdpa computes what falcon-rw was
    # trained with.
    "falcon_alibi": variant(
        "falcon",
        files={**FALCON_V4, "attention": "sdpa"},
        hidden_size=48,
        num_attention_heads=12,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "falcon_sequential": variant("falcon", UNTIED, files=FALCON_V4, parallel_attn=False),
    "falcon_parallel_mha": variant("falcon", files=FALCON_V4, multi_query=False, bias=True),
    "gptj": variant("gptj", num_attention_heads=2, rotary_dim=12, n_inner=64),
    "gptj_tied": variant("gptj", TIED, rotary_dim=4),
    "gpt_neo": variant(
        "gpt_neo",
        PLAIN,
        num_hidden_layers=3,
        attention_types=[[["global", "local"], 1], [["local"], 1]],
        window_size=6,
    ),
    "gpt_bigcode": variant("gpt_bigcode", n_inner=64),
    "gpt_bigcode_multi_head": variant("gpt_bigcode", UNTIED, multi_query=False),
    "gemma": variant(
        "gemma",
        files={"v4": {"hidden_act": "gelu", "hidden_activation": None}},
        intermediate_size=48,
        head_dim=12,
        num_key_value_heads=1,
    ),
    "gemma2": variant("gemma2", GEMMA, num_hidden_layers=3, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma2_no_caps": variant("gemma2", GEMMA, UNTIED, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3_scaled": variant(
        "gemma3_text",
        GEMMA,
        files={"v4": {"_sliding_window_pattern": ABSENT, "sliding_window_pattern": 3}},
        num_hidden_layers=4,
        rope_parameters=GEMMA3_ROPE,
        layer_types=GEMMA3_LAYERS,
        final_logit_softcapping=3.0,
    ),
    "phi": variant("phi", PLAIN, num_attention_heads=2, rope_parameters=rope(partial_rotary_factor=0.4)),
    "phi_qk_norm": variant("phi", PLAIN, num_key_value_heads=2, qk_layernorm=True),
    "phi3_partial": variant("phi3", GATED, sliding_window=8, rope_parameters=rope(partial_rotary_factor=0.5)),
    "phi3_longrope": variant(
        "phi3",
        GATED,
        files={"rope_key": "type", "crosses_limit": True},
        num_attention_heads=2,
        original_max_position_embeddings=16,
        rope_parameters=rope("longrope", **LONGROPE),
    ),
    "stablelm": variant("stablelm", GATED, use_qkv_bias=True, rope_parameters=rope(partial_rotary_factor=0.75)),
    "stablelm_parallel": variant(
        "stablelm",
        GATED,
        TIED,
        use_parallel_residual=True,
        qk_layernorm=True,
        rope_parameters=rope(partial_rotary_factor=0.5),
    ),
    "stablelm_qk_norm": variant("stablelm", PLAIN, num_attention_heads=2, num_key_value_heads=1, qk_layernorm=True),
    "starcoder2": variant("starcoder2", PLAIN, num_key_value_heads=2, sliding_window=8),
    "starcoder2_no_bias": variant("starcoder2", PLAIN, UNTIED, num_key_value_heads=1, use_bias=False),
    "olmo": variant("olmo", GATED, clip_qkv=0.8),
    "olmo_tied": variant("olmo", TIED, intermediate_size=48, attention_bias=True),
    "olmo2": variant("olmo2", GATED),
    "granite": variant(
        "granite",
        GATED,
        TIED,
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
    ),
    "granite_bias": variant(
        "granite", GATED, attention_bias=True, mlp_bias=True, attention_multiplier=0.2, logits_scaling=2
    ),
    "cohere": variant("cohere", GATED, logit_scale=0.4),
    "cohere_qk_norm": variant("cohere", GATED, logit_scale=0.7, use_qk_norm=True, attention_bias=True),
    "cohere2": variant(
        "cohere2",
        GATED,
        files={"v4": {"sliding_window_pattern": 3}},
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=3,
        logit_scale=0.5,
    ),
    "smollm3": variant("smollm3", GATED, num_hidden_layers=4, no_rope_layer_interval=3),
    "smollm3_window": variant(
        "smollm3", GATED, WINDOW, UNTIED, no_rope_layers=[0, 1, 0], attention_bias=True, mlp_bias=True
    ),
    "qwen2_moe": variant("qwen2_moe", EXPERTS, shared_expert_intermediate_size=24),
    "qwen2_moe_sparse": variant(
        "qwen2_moe",
        EXPERTS,
        shared_expert_intermediate_size=24,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        qkv_bias=False,
    ),
    "qwen3_moe": variant("qwen3_moe", EXPERTS, files=QWEN3_MOE_V4, head_dim=12, norm_topk_prob=True),
    "qwen3_moe_sparse": variant(
        "qwen3_moe",
        EXPERTS,
        TIED,
        files=QWEN3_MOE_V4,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        head_dim=8,
        attention_bias=True,
    ),
    "llama_rope_linear": llama("linear", factor=4.0),
    "llama_rope_dynamic": llama("dynamic", factor=4.0, max_positions=16),
    "llama_rope_yarn": llama("yarn", factor=4.0, original_max_position_embeddings=32),
    "llama_rope_yarn_factor": llama(
        "yarn",
        theta=100.0,
        factor=4.0,
        original_max_position_embeddings=64,
        attention_factor=1.4,
        beta_fast=2.0,
        beta_slow=0.5,
        max_positions=256,
    ),
    "llama_rope_yarn_mscale": llama(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.9, mscale_all_dim=0.4, truncate=False
    ),
    "llama_rope_longrope": llama("longrope", factor=8.0, **LONGROPE),
    "llama_rope_longrope_factor": llama("longrope", factor=8.0, attention_factor=1.3, **LONGROPE),
    "qwen2_window": variant("qwen2", GATED, WINDOW, max_window_layers=1),
    "qwen3_window": variant("qwen3", GATED, WINDOW, max_window_layers=2, head_dim=12, attention_bias=True),
    "mistral_full": variant("mistral", GATED, sliding_window=None, head_dim=12),
    "mixtral_window": variant(
        "mixtral", num_key_value_heads=2, intermediate_size=16, num_local_experts=6, sliding_window=8
    ),
    "gpt_neox_sequential": variant(
        "gpt_neox", PLAIN, use_parallel_residual=False, rope_parameters=rope(partial_rotary_factor=0.5)
    ),
    "gpt_neox_no_bias": variant("gpt_neox", PLAIN, TIED, num_attention_heads=2, attention_bias=False),
    # Those below came with the project; made anew by name, they get other parameters of the same kind.
    "gpt2": variant("gpt2", hidden_size=64),
    "gpt_neox": variant("gpt_neox", WIDE),
    "llama_plain": variant("llama", WIDE, head_dim=16, num_key_value_heads=4),
    "llama_tied_gqa": variant("llama", WIDE, TIED, head_dim=16, num_key_value_heads=2, num_hidden_layers=3),
    "llama_bias_headdim": variant(
        "llama",
        WIDE,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope(theta=5e5),
    ),
    "llama_rope_llama3": llama(
        "llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "mistral_sw8": variant("mistral", WIDE, num_key_value_heads=2, sliding_window=8),
    "mixtral": variant("mixtral", GATED, hidden_size=64, num_local_experts=4),
    "phi3": variant("phi3", WIDE, num_key_value_heads=2, original_max_position_embeddings=128),
    "qwen2": variant("qwen2", WIDE, TIED, num_key_value_heads=2),
    "qwen3": variant("qwen3", WIDE, TIED, num_key_value_heads=2, head_dim=32),
    "gemma3": variant(
        "gemma3_text",
        files={"v4": {"_sliding_window_pattern": ABSENT, "sliding_window_pattern": 6}},
        hidden_size=48,
        intermediate_size=80,
        head_dim=32,
        num_hidden_layers=7,
        num_key_value_heads=1,
        query_pre_attn_scalar=24,
        sliding_window=8,
    ),
}
