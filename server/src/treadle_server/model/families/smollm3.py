"""`smollm3`: llama without positions in every fourth layer (Bakouch et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import layered_positions
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a smollm3 config.json describes."""
    hf = HfConfig(values)
    fields = llama_fields(hf, "smollm3", context_length=32768, tied=True, theta=2e6)
    turns = _turning_layers(hf, fields["num_layers"])
    fields["positions"] = layered_positions([fields["positions"].rotary if turning else None for turning in turns])
    slides = hf.flag("use_sliding_window", default=False)
    types = hf.layer_types(fields["num_layers"], lambda layer: slides and hf.has("sliding_window") and not turns[layer])
    # `use_sliding_window` only chooses the types where they are not given: transformers masks by the types.
    windows = hf.windows(types)
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        fields,
        attention={"qkv_bias": bias, "out_bias": bias, "windows": windows},
        mlp={"bias": hf.flag("mlp_bias", default=False)},
    )


def _turning_layers(hf: HfConfig, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has positions; `no_rope_layers`, despite its name, holds 1 where it has."""
    interval = hf.integer("no_rope_layer_interval", default=4)
    given = hf.sequence("no_rope_layers", default=())
    turns = tuple(map(bool, given)) or tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(turns) != num_layers:
        raise ValueError(f"no_rope_layers must have {num_layers} entries, but has {len(turns)}")
    return turns


SMOLLM3 = Family(
    model_type="smollm3",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
