"""`gemma`: llama with a scaled embedding, tanh-GELU, and norm scales stored minus one (Gemma Team 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family
from treadle_plugin_api.hf_config import HfConfig
from treadle_plugin_api.llama_layout import ATTENTION, IGNORED, MLP, NORMS, finish_config, llama_fields, llama_table


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that a gemma config.json describes."""
    # Early files say `gelu`; the model was trained with the tanh form, which is what everyone computes.
    named = values.get("hidden_activation") or values.get("hidden_act")
    hf = HfConfig({**values, "hidden_act": "gelu_pytorch_tanh" if named == "gelu" else named})
    return finish_gemma(hf, gemma_fields(hf, "gemma"))


def gemma_fields(hf: HfConfig, model_type: str, **options: Any) -> dict[str, Any]:
    """Return the fields that all Gemmas share; `options` are those of `llama_fields`."""
    defaults: dict[str, Any] = {
        "context_length": 8192,
        "head_dim": 256,
        "tied": True,
        "activation": "gelu_pytorch_tanh",
    }
    fields = llama_fields(hf, model_type, **(defaults | options))
    hf.require("use_bidirectional_attention", (False,))
    return {**fields, "embedding_scale": math.sqrt(fields["dim"])}


def finish_gemma(
    hf: HfConfig, fields: Mapping[str, Any], *, place: str = "pre", attention: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """Return the DecoderConfig with Gemma's norms and whatever differs in its attention."""
    bias = hf.flag("attention_bias", default=False)
    return finish_config(
        hf,
        fields,
        norm={"unit_offset": True, "place": place},
        attention={"qkv_bias": bias, "out_bias": bias, **(attention or {})},
    )


GEMMA = Family(
    model_type="gemma",
    config_from_hf=config_from_hf,
    tensor_table=llama_table({**NORMS, **ATTENTION, **MLP}),
    optional_prefix="model.",
    ignored=IGNORED,
)
