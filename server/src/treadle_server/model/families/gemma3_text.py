"""`gemma3_text`: gemma2 with normalised queries and keys, and other angles in the layers with a window (2025)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig, PositionsConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import layered_positions, read_rotary
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, QK_NORMS, llama_table

from treadle_server.model.families.gemma import finish_gemma, gemma_fields
from treadle_server.model.families.gemma2 import SANDWICH_NORMS


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gemma3_text config.json describes."""
    hf = HfConfig({"sliding_window": 4096, **values, "hidden_act": values.get("hidden_activation")})
    pattern = hf.integer("sliding_window_pattern", default=6)
    types = hf.layer_types(hf.num_layers(), lambda layer: (layer + 1) % pattern != 0)
    fields = gemma_fields(hf, "gemma3_text", context_length=131072, theta=1e6)
    fields["positions"] = _positions(hf, fields["attention"].head_dim, types)
    fields["logit_softcap"] = hf.optional_number("final_logit_softcapping")
    hf.optional_number("attn_logit_softcapping")  # transformers keeps it and never applies it to this family
    attention = {
        "scale": hf.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        "qk_norm": "head",
        "windows": hf.windows(types),
    }
    return finish_gemma(hf, fields, place="sandwich", attention=attention)


def _positions(hf: HfConfig, head_dim: int, types: tuple[str, ...]) -> PositionsConfig:
    """Layers with a window keep a short wavelength, which `rope_scaling` never stretches."""
    context_length = hf.integer("max_position_embeddings", default=131072)
    full = read_rotary(hf, head_dim, context_length, theta=1e6)
    sliding = read_rotary(
        hf,
        head_dim,
        context_length,
        "sliding_attention",
        theta_keys=("rope_local_base_freq",),
        theta=1e4,
        scaled=False,
    )
    return layered_positions([full if kind == "full_attention" else sliding for kind in types])


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**SANDWICH_NORMS, **ATTENTION, **QK_NORMS, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
