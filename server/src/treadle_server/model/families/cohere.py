"""`cohere`: attention and feed-forward side by side behind one layer norm, interleaved rotary (Command R, 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, finish_config, llama_fields, llama_table
from treadle_plugin_api.naming import Name

_NORM = {"input_layernorm": "attention_norm"}
# One scale a head, [heads, head_dim].
_QK_NORMS = tuple(
    Name(
        f"model.layers.{{layer}}.self_attn.{name}_norm",
        f"layers.{{layer}}.attention.{name}_norm.{{head}}",
        stacked="head",
    )
    for name in "qk"
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a cohere config.json describes."""
    hf = HfConfig(values)
    fields = llama_fields(hf, "cohere", context_length=8192, tied=True, theta=5e5, interleaved=True)
    qk_norm = "each_head" if hf.flag("use_qk_norm", default=False) else "none"
    return finish_cohere(hf, fields, {"qk_norm": qk_norm})


def finish_cohere(hf: HfConfig, fields: Mapping[str, Any], attention: Mapping[str, Any]) -> DecoderConfig:
    """Return the DecoderConfig with what both Coheres have, and whatever differs in attention."""
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        fields,
        norm={"kind": "layer", "eps": hf.number("layer_norm_eps", default=1e-5)},
        attention={"qkv_bias": bias, "out_bias": bias, **attention},
        residual="parallel_shared",
        logit_scale=hf.number("logit_scale", default=0.0625),
    )


COHERE = Family(
    model_type="cohere",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**_NORM, **ATTENTION, **MLP}, _QK_NORMS),
    optional_prefix="model.",
    ignored=IGNORED,
)
