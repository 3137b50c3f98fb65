"""`gpt2`: layer norm, learned positions, fused q, k, v, plain GELU feed-forward (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import (
    Activation,
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
)
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gpt2 config.json describes."""
    activations: dict[str, Activation] = {
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
    }
    hf = HfConfig(values)
    hf.refuse_unless_neutral()
    hf.require("scale_attn_by_inverse_layer_idx", (False,))
    hf.require("add_cross_attention", (False,))
    dim, num_heads = hf.integer("n_embd", "hidden_size"), hf.integer("n_head", "num_attention_heads")
    if dim % num_heads:
        raise ValueError(f"n_embd must be a multiple of n_head ({num_heads}), but is {dim}")
    head_dim = dim // num_heads
    return DecoderConfig(
        model_type="gpt2",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.integer("n_layer", "num_hidden_layers"),
        context_length=hf.integer("n_positions", "n_ctx", "max_position_embeddings"),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=PositionsConfig(kind="learned"),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if hf.flag("scale_attn_weights", default=True) else 1.0,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("n_inner", default=4 * dim),
            activation=hf.choice("activation_function", activations, default="gelu_new"),
            bias=True,
        ),
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gpt2 checkpoint; its matrices are those of a Conv1D, `[in, out]`."""
    entries = [
        TensorEntry("transformer.wte.weight", ("embedding.weight",)),
        TensorEntry("transformer.wpe.weight", ("positions.weight",)),
    ]
    for layer in range(config.num_layers):
        entries += _layer_entries(f"transformer.h.{layer}.", f"layers.{layer}.")
    entries += _both("transformer.ln_f", ("final_norm",))
    return (*entries, TensorEntry("lm_head.weight", ("head.weight",)))


def _layer_entries(theirs: str, ours: str) -> list[TensorEntry]:
    return [
        *_both(f"{theirs}ln_1", (f"{ours}attention_norm",)),
        *_both(f"{theirs}attn.c_attn", tuple(f"{ours}attention.{name}" for name in "qkv"), transposed=True),
        *_both(f"{theirs}attn.c_proj", (f"{ours}attention.o",), transposed=True),
        *_both(f"{theirs}ln_2", (f"{ours}mlp_norm",)),
        *_both(f"{theirs}mlp.c_fc", (f"{ours}mlp.up",), transposed=True),
        *_both(f"{theirs}mlp.c_proj", (f"{ours}mlp.down",), transposed=True),
    ]


def _both(theirs: str, ours: tuple[str, ...], *, transposed: bool = False) -> list[TensorEntry]:
    return [
        TensorEntry(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed),
        TensorEntry(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours)),
    ]


GPT2 = Family(
    model_type="gpt2",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
