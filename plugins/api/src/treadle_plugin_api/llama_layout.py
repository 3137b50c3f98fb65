"""What llama and its many descendants share: the keys of config.json and the names of tensors.

A family reads its config with `llama_fields`, changes the fields in which it differs with `finish_config`, and names
its tensors with `llama_table`; plugins may do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig
from treadle_plugin_api.family import TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.hf_rotary import rotary_positions, stretched_context
from treadle_plugin_api.naming import Name, in_layers, make_table

# name within a layer of the file -> canonical name within a layer
ATTENTION: Mapping[str, str] = MappingProxyType({f"self_attn.{name}_proj": f"attention.{name}" for name in "qkvo"})
QK_NORMS: Mapping[str, str] = MappingProxyType({f"self_attn.{name}_norm": f"attention.{name}_norm" for name in "qk"})
MLP: Mapping[str, str] = MappingProxyType({f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")})
NORMS: Mapping[str, str] = MappingProxyType(
    {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
)
# Inverse frequencies that old checkpoints saved.
IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def llama_fields(
    hf: HfConfig,
    model_type: str,
    *,
    norm_eps: float = 1e-6,
    context_length: int = 2048,
    head_dim: int | None = None,
    tied: bool = False,
    activation: str = "silu",
    **options: Any,
) -> dict[str, Any]:
    """Return the fields of a DecoderConfig as llama reads them.

    `norm_eps`, `context_length`, `head_dim`, `tied` and `activation` stand in for absent keys; `options` are those of
    `rotary_positions`.
    """
    context_length = hf.integer("max_position_embeddings", default=context_length)
    num_layers = hf.num_layers()
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", default=head_dim or dim // num_heads)
    positions = rotary_positions(hf, head_dim, context_length, **options)
    return {
        "model_type": model_type,
        "vocab_size": hf.integer("vocab_size"),
        "dim": dim,
        "num_layers": num_layers,
        "context_length": stretched_context(context_length, positions),
        "norm": NormConfig(kind="rms", eps=hf.number("rms_norm_eps", default=norm_eps)),
        "positions": positions,
        "attention": AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=hf.integer("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
        ),
        "mlp": MlpConfig(
            hidden_dim=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act", default=activation),
            gated=True,
        ),
        "tied_head": hf.flag("tie_word_embeddings", default=tied),
    }


def finish_config(
    hf: HfConfig,
    fields: Mapping[str, Any],
    *,
    norm: Mapping[str, Any] = MappingProxyType({}),
    attention: Mapping[str, Any] = MappingProxyType({}),
    mlp: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> DecoderConfig:
    """Return the DecoderConfig of `fields` with some of them changed, once no setting is left that was not read."""
    parts = {"norm": norm, "attention": attention, "mlp": mlp}
    changed = {name: replace(fields[name], **changes) for name, changes in parts.items()}
    hf.refuse_unread()
    return DecoderConfig(**{**fields, **changed, **others})


def llama_table(
    layer: Mapping[str, str | tuple[str, ...]], others: Iterable[Name] = ()
) -> Callable[[DecoderConfig], tuple[TensorEntry, ...]]:
    """Return the tensor table of a family with these tensors in each layer, in llama's frame, and some others."""
    names = [
        Name("model.embed_tokens", "embedding"),
        *in_layers("model.layers.{layer}.", layer),
        *others,
        Name("model.norm", "final_norm"),
        Name("lm_head", "head"),
    ]
    return lambda config: make_table(config, names)


def expert_names(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> list[Name]:
    """Return the names of experts that are stored one by one under `model.layers.N.<prefix>.experts.E`."""
    theirs = f"model.layers.{{layer}}.{prefix}.experts.{{expert}}."
    ours = "layers.{layer}.mlp.experts.{expert}."
    return [Name(theirs + gate, f"{ours}gate"), Name(theirs + up, f"{ours}up"), Name(theirs + down, f"{ours}down")]


def fused_expert_names(prefix: str) -> list[Name]:
    """Return the names of a layer's experts stored as two tensors `[experts, out, in]`, gate and up in one."""
    theirs = f"model.layers.{{layer}}.{prefix}.experts."
    ours = "layers.{layer}.mlp.experts.{expert}."
    return [
        Name(f"{theirs}gate_up_proj", f"{ours}gate", f"{ours}up", stacked="expert", suffix=False),
        Name(f"{theirs}down_proj", f"{ours}down", stacked="expert", suffix=False),
    ]
