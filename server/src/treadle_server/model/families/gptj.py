"""`gptj`: interleaved rotary, attention and feed-forward side by side behind one norm (Wang and Komatsuzaki 2021)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
    RotaryConfig,
)
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.naming import Name, in_layers, make_table

_LAYER = {
    "ln_1": "attention_norm",
    "attn.q_proj": "attention.q",
    "attn.k_proj": "attention.k",
    "attn.v_proj": "attention.v",
    "attn.out_proj": "attention.o",
    "mlp.fc_in": "mlp.up",
    "mlp.fc_out": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gptj config.json describes."""
    hf = HfConfig(values)
    dim, num_heads = hf.integer("n_embd", "hidden_size"), hf.integer("n_head", "num_attention_heads")
    head_dim = hf.divide("n_embd", dim, num_heads)
    rotary_dim = hf.integer("rotary_dim", default=64)
    rotary = RotaryConfig(dim=None if rotary_dim == head_dim else rotary_dim, interleaved=True)
    config = DecoderConfig(
        model_type="gptj",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers("n_layer", "num_hidden_layers"),
        context_length=hf.integer("n_positions", "max_position_embeddings", default=2048),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=PositionsConfig(kind="rotary", rotary=rotary),
        attention=AttentionConfig(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5),
        mlp=MlpConfig(
            hidden_dim=hf.integer("n_inner", default=4 * dim),
            activation=hf.activation("activation_function", default="gelu_new"),
            bias=True,
        ),
        residual="parallel_shared",
        tied_head=hf.flag("tie_word_embeddings", default=False),
        head_bias=True,
    )
    hf.refuse_unread()
    return config


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gptj checkpoint."""
    names = [
        Name("transformer.wte", "embedding"),
        *in_layers("transformer.h.{layer}.", _LAYER),
        Name("transformer.ln_f", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


GPTJ = Family(
    model_type="gptj",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.((masked_)?bias|embed_positions)",),
)
