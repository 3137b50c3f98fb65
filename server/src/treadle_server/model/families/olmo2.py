"""`olmo2`: llama with the norms behind the sublayers, and queries and keys normalised whole (OLMo Team 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import (
    ATTENTION,
    IGNORED,
    MLP,
    QK_NORMS,
    finish_config,
    llama_fields,
    llama_table,
)

_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that an olmo2 config.json describes."""
    hf = HfConfig(values)
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        llama_fields(hf, "olmo2", norm_eps=1e-5),
        norm={"place": "output"},
        attention={"qkv_bias": bias, "out_bias": bias, "qk_norm": "whole"},
    )


OLMO2 = Family(
    model_type="olmo2",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**ATTENTION, **QK_NORMS, **_NORMS, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
