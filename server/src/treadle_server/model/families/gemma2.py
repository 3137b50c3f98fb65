"""`gemma2`: gemma with norms on both sides of a sublayer, windows in every other layer, and soft-caps (2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, llama_table

from treadle_server.model.families.gemma import finish_gemma, gemma_fields

SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gemma2 config.json describes."""
    hf = HfConfig({"sliding_window": 4096, **values, "hidden_act": values.get("hidden_activation")})
    types = hf.layer_types(hf.num_layers(), lambda layer: layer % 2 == 0)
    fields = gemma_fields(hf, "gemma2", layer_types=types)
    fields["logit_softcap"] = hf.optional_number("final_logit_softcapping", default=30.0)
    attention = {
        "scale": hf.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        "softcap": hf.optional_number("attn_logit_softcapping", default=50.0),
        "windows": hf.windows(types),
    }
    return finish_gemma(hf, fields, place="sandwich", attention=attention)


GEMMA2 = Family(
    model_type="gemma2",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**SANDWICH_NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
