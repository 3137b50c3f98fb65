"""`granite`: llama with multipliers on embedding, attention, residuals and logits (Granite Team 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a granite config.json describes."""
    hf = HfConfig(values)
    bias = hf.flag("attention_bias", default=False)
    logits_scaling = hf.number("logits_scaling", default=1.0)
    if logits_scaling == 0:
        raise ValueError("logits_scaling must not be 0")
    return finish_config(
        hf,
        llama_fields(hf, "granite"),
        attention={"qkv_bias": bias, "out_bias": bias, "scale": hf.number("attention_multiplier", default=1.0)},
        mlp={"bias": hf.flag("mlp_bias", default=False)},
        embedding_scale=hf.number("embedding_multiplier", default=1.0),
        residual_scale=hf.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / logits_scaling,
    )


GRANITE = Family(
    model_type="granite",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
