"""`cohere2`: cohere with windows in three layers of four, and no positions in the fourth (Command R7B, 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import layered_positions
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, llama_fields, llama_table

from treadle_server.model.families.cohere import finish_cohere


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a cohere2 config.json describes."""
    hf = HfConfig({"sliding_window": 4096, **values})
    pattern = hf.integer("sliding_window_pattern", default=4)
    types = hf.layer_types(hf.num_layers(), lambda layer: (layer + 1) % pattern != 0)
    fields = llama_fields(hf, "cohere2", context_length=8192, tied=True, interleaved=True)
    rotary = fields["positions"].rotary
    fields["positions"] = layered_positions([rotary if kind == "sliding_attention" else None for kind in types])
    return finish_cohere(hf, fields, {"windows": hf.windows(types)})


COHERE2 = Family(
    model_type="cohere2",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({"input_layernorm": "attention_norm", **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
