"""`qwen3_moe`: qwen3 with experts in place of the feed-forward (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig, MoeConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import (
    ATTENTION,
    IGNORED,
    MLP,
    NORMS,
    QK_NORMS,
    expert_names,
    finish_config,
    fused_expert_names,
    llama_fields,
    llama_table,
)

from treadle_server.model.families.qwen2_moe import expert_layers

_LAYER = {**NORMS, **ATTENTION, **QK_NORMS, **MLP, "mlp.gate": "mlp.router"}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a qwen3_moe config.json describes."""
    hf = HfConfig(values)
    fields = llama_fields(hf, "qwen3_moe", context_length=32768)
    bias = hf.flag("attention_bias", default=False)
    windows = hf.window_in_all(fields["num_layers"], default=4096)
    moe = MoeConfig(
        num_experts=hf.integer("num_experts", "num_local_experts", default=128),
        top_k=hf.integer("num_experts_per_tok", default=8),
        hidden_dim=hf.integer("moe_intermediate_size", default=768),
        normalized=hf.flag("norm_topk_prob", default=False),
        layers=expert_layers(hf),
    )
    return finish_config(
        hf,
        fields,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": "head",
            "windows": windows if hf.flag("use_sliding_window", default=False) else (),
        },
        moe=moe,
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    config_from_hf=config_from_hf,
    tensor_table=llama_table(_LAYER, expert_names("mlp")),
    other_tables=(llama_table(_LAYER, fused_expert_names("mlp")),),
    optional_prefix="model.",
    ignored=IGNORED,
)
