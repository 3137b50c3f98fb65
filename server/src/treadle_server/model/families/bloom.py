"""`bloom`: ALiBi, a norm on the embedding, q, k and v fused head by head (BigScience 2022)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.naming import Name, in_layers, make_table

from treadle_server.model.families.gpt2 import QKV

_LAYER = "transformer.h.{layer}."
_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a bloom config.json describes."""
    hf = HfConfig(values)
    dim, num_heads = hf.integer("hidden_size", "n_embed"), hf.integer("n_head", "num_attention_heads")
    head_dim = hf.divide("hidden_size", dim, num_heads)
    config = DecoderConfig(
        model_type="bloom",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers("n_layer", "num_hidden_layers"),
        context_length=hf.integer("seq_length", "max_position_embeddings", default=2048),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=PositionsConfig(kind="alibi"),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpConfig(hidden_dim=4 * dim, activation="gelu_tanh", bias=True),
        residual_from_norm=hf.flag("apply_residual_connection_post_layernorm", default=False),
        embedding_norm=True,
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )
    hf.refuse_unread()
    return config


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a bloom checkpoint."""
    names = [
        Name("transformer.word_embeddings", "embedding"),
        Name("transformer.word_embeddings_layernorm", "embedding_norm"),
        Name(f"{_LAYER}self_attention.query_key_value", *QKV, groups=config.attention.num_heads),
        *in_layers(_LAYER, _NAMES),
        Name("transformer.ln_f", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


BLOOM = Family(
    model_type="bloom",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
)
