"""`gpt2`: layer norm, learned positions, fused q, k, v, plain GELU feed-forward (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.naming import Name, in_layers, make_table

_LAYER = "transformer.h.{layer}."
QKV = tuple(f"layers.{{layer}}.attention.{name}" for name in "qkv")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gpt2 config.json describes."""
    hf = HfConfig(values)
    inverse_layer_scale = hf.flag("scale_attn_by_inverse_layer_idx", default=False)
    return gpt2_config(hf, "gpt2", activation="gelu_new", inverse_layer_scale=inverse_layer_scale)


def gpt2_config(
    hf: HfConfig,
    model_type: str,
    *,
    activation: str,
    num_kv_heads: int | None = None,
    inverse_layer_scale: bool = False,
) -> DecoderConfig:
    """Return the decoder of a config with GPT-2's keys; `activation` stands in for an absent key."""
    dim, num_heads = hf.integer("n_embd", "hidden_size"), hf.integer("n_head", "num_attention_heads")
    head_dim = hf.divide("n_embd", dim, num_heads)
    config = DecoderConfig(
        model_type=model_type,
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.num_layers("n_layer", "num_hidden_layers"),
        context_length=hf.integer("n_positions", "n_ctx", "max_position_embeddings"),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=PositionsConfig(kind="learned"),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if hf.flag("scale_attn_weights", default=True) else 1.0,
            inverse_layer_scale=inverse_layer_scale,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("n_inner", default=4 * dim),
            activation=hf.activation("activation_function", default=activation),
            bias=True,
        ),
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )
    hf.refuse_unread()
    return config


def gpt2_table(config: DecoderConfig, *, transposed: bool, groups: int = 1) -> tuple[TensorEntry, ...]:
    """Return the tensors of a checkpoint with GPT-2's names; `groups` cuts the fused q, k, v."""
    ours = "layers.{layer}."
    names = [
        Name("transformer.wte", "embedding"),
        Name("transformer.wpe", "positions"),
        *in_layers(_LAYER, {"ln_1": "attention_norm", "ln_2": "mlp_norm"}),
        Name(f"{_LAYER}attn.c_attn", *QKV, transposed=transposed, groups=groups),
        Name(f"{_LAYER}attn.c_proj", f"{ours}attention.o", transposed=transposed),
        Name(f"{_LAYER}mlp.c_fc", f"{ours}mlp.up", transposed=transposed),
        Name(f"{_LAYER}mlp.c_proj", f"{ours}mlp.down", transposed=transposed),
        Name("transformer.ln_f", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gpt2 checkpoint; its matrices are those of a Conv1D, `[in, out]`."""
    return gpt2_table(config, transposed=True)


GPT2 = Family(
    model_type="gpt2",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
