"""`olmo`: llama with norms that have no parameters, and clipped queries, keys and values (Groeneveld et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that an olmo config.json describes."""
    hf = HfConfig(values)
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        llama_fields(hf, "olmo"),
        norm={"kind": "layer", "eps": 1e-5, "scale": False},
        attention={"qkv_bias": bias, "out_bias": bias, "clip_qkv": hf.optional_number("clip_qkv")},
    )


OLMO = Family(
    model_type="olmo",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
