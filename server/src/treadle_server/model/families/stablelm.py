"""`stablelm`: llama with layer norms and rotary in a quarter of each head (Bellagente et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table
from treadle_plugin_api.naming import Name

_QK_NORMS = tuple(
    Name(
        f"model.layers.{{layer}}.self_attn.{name}_layernorm.norms.{{head}}",
        f"layers.{{layer}}.attention.{name}_norm.{{head}}",
    )
    for name in "qk"
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a stablelm config.json describes."""
    hf = HfConfig(values)
    return finish_config(
        hf,
        llama_fields(hf, "stablelm", context_length=4096, partial=0.25),
        norm={"kind": "layer", "eps": hf.number("layer_norm_eps", default=1e-5), "bias": True},
        attention={
            "qkv_bias": hf.flag("use_qkv_bias", default=False),
            "qk_norm": "each_head" if hf.flag("qk_layernorm", default=False) else "none",
        },
        residual="parallel_shared" if hf.flag("use_parallel_residual", default=False) else "serial",
    )


STABLELM = Family(
    model_type="stablelm",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}, _QK_NORMS),
    optional_prefix="model.",
    ignored=IGNORED,
)
