"""`starcoder2`: llama's attention with layer norms, biases and a plain feed-forward (Lozhkov et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a starcoder2 config.json describes."""
    hf = HfConfig(values)
    hf.require("norm_type", ("layer_norm",))
    hf.require("mlp_type", ("default",))
    fields = llama_fields(hf, "starcoder2", context_length=4096, tied=True, activation="gelu_pytorch_tanh")
    bias = hf.flag("use_bias", default=True)
    windows = hf.window_in_all(fields["num_layers"], default=None)
    return finish_config(
        hf,
        fields,
        norm={"kind": "layer", "eps": hf.number("norm_epsilon", default=1e-5), "bias": True},
        attention={"qkv_bias": bias, "out_bias": bias, "windows": windows},
        mlp={"gated": False, "bias": bias},
    )


STARCODER2 = Family(
    model_type="starcoder2",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}),
    optional_prefix="model.",
    ignored=IGNORED,
)
