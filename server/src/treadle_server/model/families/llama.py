"""`llama`: RMS norm, rotary positions, grouped queries, gated SiLU feed-forward (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig

# canonical name within a layer -> file name within a layer
_LAYER_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("attention.q", "self_attn.q_proj"),
    ("attention.k", "self_attn.k_proj"),
    ("attention.v", "self_attn.v_proj"),
    ("attention.o", "self_attn.o_proj"),
    ("mlp_norm", "post_attention_layernorm"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a llama config.json describes."""
    hf = HfConfig(values)
    hf.refuse_unless_neutral()
    hf.require("hidden_act", ("silu",))
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", default=dim // num_heads)
    bias = hf.flag("attention_bias", default=False)
    return DecoderConfig(
        model_type="llama",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=hf.integer("num_hidden_layers"),
        context_length=hf.integer("max_position_embeddings", default=2048),
        norm=NormConfig(kind="rms", eps=hf.number("rms_norm_eps", default=1e-6)),
        positions=PositionsConfig(kind="rotary", rotary=hf.rotary()),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=hf.integer("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("intermediate_size"),
            activation="silu",
            gated=True,
            bias=hf.flag("mlp_bias", default=False),
        ),
        tied_head=hf.flag("tie_word_embeddings", default=False),
    )


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a llama checkpoint."""
    entries = [TensorEntry("model.embed_tokens.weight", ("embedding.weight",))]
    for layer in range(config.num_layers):
        for ours, theirs in _LAYER_NAMES:
            entries += [
                TensorEntry(f"model.layers.{layer}.{theirs}.{part}", (f"layers.{layer}.{ours}.{part}",))
                for part in _parts(config, ours)
            ]
    entries.append(TensorEntry("model.norm.weight", ("final_norm.weight",)))
    entries.append(TensorEntry("lm_head.weight", ("head.weight",)))
    return tuple(entries)


def _parts(config: DecoderConfig, name: str) -> tuple[str, ...]:
    if name.endswith("norm"):
        return ("weight",)
    bias = config.mlp.bias if name.startswith("mlp.") else config.attention.qkv_bias
    return ("weight", "bias") if bias else ("weight",)


LLAMA = Family(
    model_type="llama",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="model.",
    ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
