"""`gpt_neo`: gpt2 with unscaled attention and a window in every other layer (Black et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_plugin_api.family import Family, TensorEntry
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.naming import Name, in_layers, make_table

_LAYER = {
    "ln_1": "attention_norm",
    "attn.attention.q_proj": "attention.q",
    "attn.attention.k_proj": "attention.k",
    "attn.attention.v_proj": "attention.v",
    "attn.attention.out_proj": "attention.o",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gpt_neo config.json describes."""
    hf = HfConfig(values)
    dim, num_heads = hf.integer("hidden_size"), hf.integer("num_heads", "num_attention_heads")
    num_layers = hf.num_layers("num_layers", "num_hidden_layers")
    config = DecoderConfig(
        model_type="gpt_neo",
        vocab_size=hf.integer("vocab_size"),
        dim=dim,
        num_layers=num_layers,
        context_length=hf.integer("max_position_embeddings", default=2048),
        norm=NormConfig(kind="layer", eps=hf.number("layer_norm_epsilon", default=1e-5), bias=True),
        positions=PositionsConfig(kind="learned"),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hf.divide("hidden_size", dim, num_heads),
            scale=1.0,
            out_bias=True,
            windows=_windows(hf, num_layers),
        ),
        mlp=MlpConfig(
            hidden_dim=hf.integer("intermediate_size", default=4 * dim),
            activation=hf.activation("activation_function", default="gelu_new"),
            bias=True,
        ),
        tied_head=hf.flag("tie_word_embeddings", default=True),
    )
    hf.refuse_unread()
    return config


def _windows(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; `attention_types` is a list of [[kinds], how often they are repeated]."""
    kinds: list[object] = []
    for item in hf.sequence("attention_types", default=([["global", "local"], 12],)):
        match item:
            case [list() as repeated, int() as count] if 0 <= count <= num_layers:
                kinds += repeated * count
            case _:
                raise ValueError(f"attention_types must be a list of [[kinds], count], but has {item!r}")
    if len(kinds) != num_layers or not {"global", "local"}.issuperset(map(str, kinds)):
        raise ValueError(f"attention_types must name global or local for {num_layers} layers, but names {kinds}")
    window = hf.integer("window_size", default=256)
    return tuple(window if kind == "local" else None for kind in kinds) if "local" in kinds else ()


def tensor_table(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the tensors of a gpt_neo checkpoint."""
    names = [
        Name("transformer.wte", "embedding"),
        Name("transformer.wpe", "positions"),
        *in_layers("transformer.h.{layer}.", _LAYER),
        Name("transformer.ln_f", "final_norm"),
        Name("lm_head", "head"),
    ]
    return make_table(config, names)


GPT_NEO = Family(
    model_type="gpt_neo",
    config_from_hf=config_from_hf,
    tensor_table=tensor_table,
    optional_prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.attention\.(masked_)?bias",),
)
