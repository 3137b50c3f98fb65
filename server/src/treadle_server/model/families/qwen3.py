"""`qwen3`: llama with queries and keys normalised head by head (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import (
    ATTENTION,
    IGNORED,
    MLP,
    NORMS,
    QK_NORMS,
    finish_config,
    llama_fields,
    llama_table,
)

from treadle_server.model.families.qwen2 import upper_window_types


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a qwen3 config.json describes."""
    hf = HfConfig(values)
    types, bias = upper_window_types(hf), hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        llama_fields(hf, "qwen3", context_length=32768, head_dim=128, layer_types=types),
        attention={"qkv_bias": bias, "out_bias": bias, "qk_norm": "head", "windows": hf.windows(types)},
    )


QWEN3 = Family(
    model_type="qwen3",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **QK_NORMS, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
