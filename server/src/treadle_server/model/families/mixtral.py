"""`mixtral`: mistral with experts in place of the feed-forward (Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig, MoeConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import (
    ATTENTION,
    IGNORED,
    NORMS,
    expert_names,
    finish_config,
    fused_expert_names,
    llama_fields,
    llama_table,
)

_MOE = "block_sparse_moe"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a mixtral config.json describes."""
    hf = HfConfig(values)
    fields = llama_fields(hf, "mixtral", norm_eps=1e-5, context_length=131072, theta=1e6)
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", "num_experts", default=8),
        top_k=hf.integer("num_experts_per_tok", default=2),
        hidden_dim=fields["mlp"].hidden_dim,
    )
    windows = hf.window_in_all(fields["num_layers"], default=None)
    return finish_config(hf, fields, attention={"windows": windows}, moe=moe)


MIXTRAL = Family(
    model_type="mixtral",
    config_from_hf=config_from_hf,
    tensor_table=llama_table(
        {**NORMS, **ATTENTION, f"{_MOE}.gate": "mlp.router"},
        expert_names(_MOE, gate="w1", up="w3", down="w2"),
    ),
    other_tables=(llama_table({**NORMS, **ATTENTION, "mlp.gate": "mlp.router"}, fused_expert_names("mlp")),),
    optional_prefix="model.",
    ignored=IGNORED,
)
