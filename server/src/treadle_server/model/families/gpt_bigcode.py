"""`gpt_bigcode`: gpt2 with one key and value head, and matrices the usual way round (Ben Allal et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig

from treadle_server.model.families.gpt2 import gpt2_config, gpt2_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gpt_bigcode config.json describes."""
    hf = HfConfig(values)
    num_kv_heads = 1 if hf.flag("multi_query", default=True) else None
    return gpt2_config(hf, "gpt_bigcode", activation="gelu_pytorch_tanh", num_kv_heads=num_kv_heads)


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gpt_bigcode checkpoint; without multi-query, q, k and v alternate head by head."""
    return gpt2_table(config, transposed=False, groups=config.attention.num_kv_heads)


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
