"""`qwen2_moe`: qwen2 with many small experts and one, behind a gate, that sees every token (Yang et al. 2024)."""

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
    expert_names,
    finish_config,
    fused_expert_names,
    llama_fields,
    llama_table,
)

_LAYER = {
    **NORMS,
    **ATTENTION,
    **MLP,
    "mlp.gate": "mlp.router",
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a qwen2_moe config.json describes."""
    hf = HfConfig(values)
    types = _layer_types(hf)
    moe = MoeConfig(
        num_experts=hf.integer("num_experts", "num_local_experts", default=60),
        top_k=hf.integer("num_experts_per_tok", default=4),
        hidden_dim=hf.integer("moe_intermediate_size", default=1408),
        normalized=hf.flag("norm_topk_prob", default=False),
        shared_dim=hf.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
        layers=expert_layers(hf),
    )
    return finish_config(
        hf,
        llama_fields(hf, "qwen2_moe", context_length=32768, layer_types=types),
        attention={"qkv_bias": hf.flag("qkv_bias", default=True), "windows": hf.windows(types)},
        moe=moe,
    )


def expert_layers(hf: HfConfig) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = hf.integer("decoder_sparse_step", default=1)
    dense = hf.sequence("mlp_only_layers", default=())
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(hf.num_layers()))
    return () if all(layers) else layers


def _layer_types(hf: HfConfig) -> tuple[str, ...]:
    """Without `layer_types` every other layer under `max_window_layers` slides, if any may."""
    slides = hf.flag("use_sliding_window", default=False)
    last = hf.integer("max_window_layers", default=28, minimum=0)
    return hf.layer_types(hf.num_layers(), lambda layer: slides and layer % 2 == 0 and layer < last)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    config_from_hf=config_from_hf,
    tensor_table=llama_table(_LAYER, expert_names("mlp")),
    other_tables=(llama_table(_LAYER, fused_expert_names("mlp")),),
    optional_prefix="model.",
    ignored=IGNORED,
)
