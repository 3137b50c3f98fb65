"""`mistral`: llama with a sliding window in every layer (Jiang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a mistral config.json describes."""
    hf = HfConfig(values)
    fields = llama_fields(hf, "mistral", context_length=131072)
    windows = hf.window_in_all(fields["num_layers"], default=4096)
    return finish_config(hf, fields, attention={"windows": windows})


MISTRAL = Family(
    model_type="mistral",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
