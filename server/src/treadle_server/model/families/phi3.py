"""`phi3`: llama with q, k, v and gate, up each in one tensor, and longrope (Abdin et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import IGNORED, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a phi3 config.json describes."""
    # Where it is absent transformers has this one, whatever stands among the rotary settings.
    hf = HfConfig({"original_max_position_embeddings": 4096, **values})
    fields = llama_fields(
        hf,
        "phi3",
        norm_eps=1e-5,
        context_length=4096,
        partial=1.0,
        # The first files call longrope by its names of the time.
        kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    )
    windows = hf.window_in_all(fields["num_layers"], default=None)
    return finish_config(hf, fields, attention={"windows": windows})


PHI3 = Family(
    model_type="phi3",
    config_from_hf=config_from_hf,
    tensor_table=llama_table(
        {
            **NORMS,
            "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
            "self_attn.o_proj": "attention.o",
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
            "mlp.down_proj": "mlp.down",
        }
    ),
    optional_prefix="model.",
    ignored=IGNORED,
)
