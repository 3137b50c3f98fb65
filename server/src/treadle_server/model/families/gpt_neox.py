"""`gpt_neox`: rotary in a quarter of each head, attention and feed-forward side by side (Black et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import rotary_positions, stretched_context
from treadle_plugin_api.naming import Name, in_layers, make_table

from treadle_server.model.families.gpt2 import QKV

_LAYER = "gpt_neox.layers.{layer}."
_NAMES = {
    "input_layernorm": "attention_norm",
    "attention.dense": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gpt_neox config.json describes."""
    hf = HfConfig(values)
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = hf.divide("hidden_size", dim, num_heads)
    context_length = hf.integer("max_position_embeddings", default=2048)
    bias = hf.flag("attention_bias", default=True)
    positions = rotary_positions(
        hf, head_dim, context_length, theta_keys=("rotary_emb_base",), partial_keys=("rotary_pct",), partial=0.25
    )
    config = DecoderConfig(
        model_type="gpt_neox",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers(),
        context_length=stretched_context(context_length, positions),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_eps", default=1e-5), bias=True),
        positions=positions,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act", default="gelu"),
            bias=True,
        ),
        residual="parallel" if hf.flag("use_parallel_residual", default=True) else "serial",
        tied_head=hf.flag("tie_word_embeddings", default=False),
    )
    hf.refuse_unread()
    return config


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gpt_neox checkpoint; q, k and v alternate head by head."""
    names = [
        Name("gpt_neox.embed_in", "embedding"),
        Name(f"{_LAYER}attention.query_key_value", *QKV, groups=config.attention.num_heads),
        *in_layers(_LAYER, _NAMES),
        Name("gpt_neox.final_layer_norm", "final_norm"),
        Name("embed_out", "head"),
    ]
    return make_table(config, names)


GPT_NEOX = Family(
    model_type="gpt_neox",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="gpt_neox.",
    ignored=(r"(gpt_neox\.)?layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)
