"""`treadle_classic`: the decoder side of the original transformer (Vaswani et al. 2017), for small models of our own.

Sinusoidal positions, LayerNorm after each residual addition, no norm before the head, a plain ReLU feed-forward. Its
file names are the canonical names of `treadle_plugin_api.family`. config.json:

    model_type "treadle_classic"         vocab_size               hidden_size
    num_hidden_layers                    num_attention_heads      head_dim (default hidden_size / num_attention_heads)
    intermediate_size                    layer_norm_eps (1e-5)    max_position_embeddings (512; not a hard limit)
    attention_bias, mlp_bias, head_bias (each false)              tie_word_embeddings (false)
    scale_embedding (false)              the token embedding is multiplied by sqrt(hidden_size)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.parameters import param_shapes


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a treadle_classic config.json describes."""
    hf = HfConfig(values)
    hf.require("hidden_act", ("relu",))
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", default=dim // num_heads)
    bias = hf.flag("attention_bias", default=False)
    config = DecoderConfig(
        model_type="treadle_classic",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers(),
        context_length=hf.integer("max_position_embeddings", default=512),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_eps", default=1e-5), bias=True, place="post"),
        positions=PositionsConfig(kind="sinusoidal"),
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
            activation="relu",
            bias=hf.flag("mlp_bias", default=False),
        ),
        tied_head=hf.flag("tie_word_embeddings", default=False),
        head_bias=hf.flag("head_bias", default=False),
        embedding_scale=math.sqrt(dim) if hf.flag("scale_embedding", default=False) else 1.0,
    )
    hf.refuse_unread()
    return config


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a treadle_classic checkpoint: the canonical parameters under their own names."""
    names = [*param_shapes(config)]
    if config.tied_head:
        names.append("head.weight")
    return tuple(TensorEntry(name, (name,)) for name in names)


TREADLE_CLASSIC = Family(model_type="treadle_classic", config_from_hf=config_from_hf, tensor_table=tensor_table)
