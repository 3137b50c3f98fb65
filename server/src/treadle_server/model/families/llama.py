"""`llama`: RMS norm, rotary positions, grouped queries, gated SiLU feed-forward (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a llama config.json describes."""
    hf = HfConfig(values)
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        llama_fields(hf, "llama"),
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"bias": hf.flag("mlp_bias", default=False)},
    )


LLAMA = Family(
    model_type="llama",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
