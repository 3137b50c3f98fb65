"""`falcon`: one or few key heads, attention and feed-forward side by side or not, rotary or ALiBi (Almazrouei 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
    Residual,
)
from treadle_plugin_api.family import Family, TensorEntry, UnsupportedSettingError
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import rotary_positions, stretched_context
from treadle_plugin_api.naming import Name, in_layers, make_table

from treadle_server.model.families.gpt2 import QKV

_LAYER = "transformer.h.{layer}."
_NAMES = {
    "self_attention.dense": "attention.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a falcon config.json describes."""
    hf = HfConfig(values)
    dim = hf.integer("hidden_size", "n_embed")
    attention = _attention(hf, dim)
    context_length = hf.integer("max_position_embeddings", default=2048)
    if hf.flag("alibi", default=False):
        positions = PositionsConfig(kind="alibi", alibi_scaled=True, alibi_rounded=True)
    else:
        positions = rotary_positions(hf, attention.head_dim, context_length)
    config = DecoderConfig(
        model_type="falcon",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers("num_hidden_layers", "n_layer"),
        context_length=stretched_context(context_length, positions),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=positions,
        attention=attention,
        mlp=MlpConfig(
            hidden_dim=hf.integer("ffn_hidden_size", default=4 * dim),
            activation=hf.activation("activation", default="gelu"),
            bias=attention.out_bias,
        ),
        residual=_residual(hf),
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )
    hf.refuse_unread()
    return config


def _attention(hf: HfConfig, dim: int) -> AttentionConfig:
    num_heads = hf.integer("num_attention_heads", "n_head")
    num_kv_heads = hf.integer("num_kv_heads", "n_head_kv", default=num_heads)
    if not hf.flag("new_decoder_architecture", default=False):
        num_kv_heads = 1 if hf.flag("multi_query", default=True) else num_heads
    head_dim = hf.divide("hidden_size", dim, num_heads)
    bias = hf.flag("bias", default=False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
    )


def _residual(hf: HfConfig) -> Residual:
    new = hf.flag("new_decoder_architecture", default=False)
    if not hf.flag("parallel_attn", default=True):
        if new:
            raise UnsupportedSettingError("parallel_attn False is not supported with new_decoder_architecture")
        return "serial"
    return "parallel" if new and hf.integer("num_ln_in_parallel_attn", default=2) == 2 else "parallel_shared"


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a falcon checkpoint; each key head's queries, key and value stand together."""
    two_norms = config.residual == "parallel"
    names = [
        Name("transformer.word_embeddings", "embedding"),
        Name(f"{_LAYER}self_attention.query_key_value", *QKV, groups=config.attention.num_kv_heads),
        Name(_LAYER + ("ln_attn" if two_norms else "input_layernorm"), "layers.{layer}.attention_norm"),
        Name(_LAYER + ("ln_mlp" if two_norms else "post_attention_layernorm"), "layers.{layer}.mlp_norm"),
        *in_layers(_LAYER, _NAMES),
        Name("transformer.ln_f", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


FALCON = Family(
    model_type="falcon",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.self_attention\.(rotary_emb|maybe_rotary)\.inv_freq",),
)
