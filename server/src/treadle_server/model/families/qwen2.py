"""`qwen2`: llama with biases on q, k and v, and windows in the upper layers if asked for (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a qwen2 config.json describes."""
    hf = HfConfig(values)
    types = upper_window_types(hf)
    return finish_config(
        hf,
        llama_fields(hf, "qwen2", context_length=32768, layer_types=types),
        attention={"qkv_bias": True, "windows": hf.windows(types)},
    )


def upper_window_types(hf: HfConfig) -> tuple[str, ...]:
    """Return each layer's type; without `layer_types` those from `max_window_layers` on slide, if any may."""
    slides = hf.flag("use_sliding_window", default=False) and hf.has("sliding_window")
    first = hf.integer("max_window_layers", default=28, minimum=0)
    return hf.layer_types(hf.num_layers(), lambda layer: slides and layer >= first)


QWEN2 = Family(
    model_type="qwen2",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
