"""`phi`: attention and feed-forward side by side behind one layer norm, rotary in half of a head (Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, finish_config, llama_fields
from treadle_plugin_api.naming import Name, in_layers, make_table

_LAYER = {
    "input_layernorm": "attention_norm",
    **{theirs.replace("o_proj", "dense"): ours for theirs, ours in ATTENTION.items()},
    "self_attn.q_layernorm": "attention.q_norm",
    "self_attn.k_layernorm": "attention.k_norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a phi config.json describes."""
    hf = HfConfig(values)
    qk_norm = hf.flag("qk_layernorm", default=False)
    return finish_config(
        hf,
        llama_fields(hf, "phi", partial=0.5, activation="gelu_new"),
        norm={"kind": "layer", "eps": hf.number("layer_norm_eps", default=1e-5), "bias": True},
        attention={
            "qkv_bias": True,
            "out_bias": True,
            "qk_norm": "head" if qk_norm else "none",
            "qk_norm_bias": qk_norm,
        },
        mlp={"gated": False, "bias": True},
        residual="parallel_shared",
        head_bias=True,
    )


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a phi checkpoint."""
    names = [
        Name("model.embed_tokens", "embedding"),
        *in_layers("model.layers.{layer}.", _LAYER),
        Name("model.final_layernorm", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


PHI = Family(
    model_type="phi",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="model.",
    ignored=IGNORED,
)
