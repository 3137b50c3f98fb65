"""`opt`: learned positions that start at row 2, ReLU; one size has norms behind and a narrow embedding (2022)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    NormPlace,
    PositionsConfig,
)
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.naming import Name, in_layers, make_table

_LAYER = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.o",
    "self_attn_layer_norm": "attention_norm",
    "fc1": "mlp.up",
    "fc2": "mlp.down",
    "final_layer_norm": "mlp_norm",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that an opt config.json describes."""
    hf = HfConfig(values)
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = hf.divide("hidden_size", dim, num_heads)
    bias = hf.flag("enable_bias", default=True)
    scale = hf.flag("layer_norm_elementwise_affine", default=True)
    place: NormPlace = "pre" if hf.flag("do_layer_norm_before", default=True) else "post"
    width = hf.integer("word_embed_proj_dim", default=dim)
    config = DecoderConfig(
        model_type="opt",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers(),
        context_length=hf.integer("max_position_embeddings", default=2048),
        norm=NormConfig(kind="layer", eps=1e-5, bias=scale, scale=scale, place=place),
        positions=PositionsConfig(kind="learned", offset=2),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("ffn_dim"), activation=hf.activation("activation_function", default="relu"), bias=bias
        ),
        final_norm=not hf.flag("_remove_final_layer_norm", default=False),
        embedding_dim=None if width == dim else width,
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )
    hf.refuse_unread()
    return config


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of an opt checkpoint."""
    names = [
        Name("model.decoder.embed_tokens", "embedding"),
        Name("model.decoder.project_in", "embedding_in"),
        Name("model.decoder.embed_positions", "positions"),
        *in_layers("model.decoder.layers.{layer}.", _LAYER),
        Name("model.decoder.final_layer_norm", "final_norm"),
        Name("model.decoder.project_out", "embedding_out"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


OPT = Family(
    model_type="opt",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="model.",
)
