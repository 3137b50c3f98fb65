"""The GGUF architectures that can be imported: one entry each, with its names, its config and how rows are ordered.

Names are those of `gguf.constants` on the left and Hugging Face's on the right, each without `.weight` or `.bias`. A
name with `{}` in it stands for many tensors, one for each item of the stored tensor's first dimension; a tuple of names
shares the stored rows out as queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from treadle_server.checkpoints import gguf_configs as configs
from treadle_server.checkpoints.gguf_rows import Heads, fused_groups, key_halves, query_halves
from treadle_server.checkpoints.gguf_settings import Settings

Target = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a GGUF architecture becomes a Hugging Face model.

    Attributes:
        layer_prefix: what stands before a layer's number in Hugging Face's names.
        rows: the order of the rows of some modules of a layer.
        norm_offset: what the file has added to the weights of norms.
        transposed: the modules of a layer whose matrices Hugging Face stores as [in, out].
        unsqueezed: the modules whose leading dimension of size 1 the file has dropped.
    """

    model_type: str
    hf_class: str
    config: Callable[[Settings], configs.Config]
    top: Mapping[str, Target]
    layer: Mapping[str, Target]
    layer_prefix: str = "model.layers."
    rows: Mapping[str, Callable[[Heads], np.ndarray]] = field(default_factory=dict)
    norm_offset: float = 0.0
    transposed: frozenset[str] = frozenset()
    unsqueezed: frozenset[str] = frozenset()


# Entries that GGUF files name by the first word only.
_VARIANTS = frozenset({"mistral", "mixtral", "falcon with two norms"})


def find_architecture(settings: Settings) -> Architecture:
    """Return the entry of a file; raises UnsupportedModelError when there is none."""
    name = settings.architecture
    if name == "llama" and settings.optional_integer("expert_count"):
        name = "mixtral"
    elif name == "llama" and settings.optional_integer("attention.sliding_window"):
        name = "mistral"
    elif name == "falcon" and settings.has_tensor("attn_norm_2.weight"):
        name = "falcon with two norms"
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(set(ARCHITECTURES) - _VARIANTS))
        raise settings.unsupported(f"the GGUF architecture {name!r} is not supported; supported: {known}")
    return ARCHITECTURES[name]


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_UNNORMED_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head"}  # OLMo's norms have no weights
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = _ATTENTION | _MLP | _NORMS
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = _ATTENTION | _MLP | _POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_HALVES = {"attn_q": query_halves, "attn_k": key_halves}

_GPT_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FALCON_TOP = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM_TOP = _FALCON_TOP | {"token_embd_norm": "transformer.word_embeddings_layernorm"}
_FUSED = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _llama_like(
    model_type: str,
    hf_class: str,
    config: Callable[[Settings], configs.Config],
    layer: Mapping[str, Target] = MappingProxyType(_LLAMA),
    *,
    top: Mapping[str, Target] = MappingProxyType(_TOP),
    norm_offset: float = 0.0,
    rows: Mapping[str, Callable[[Heads], np.ndarray]] = MappingProxyType({}),
) -> Architecture:
    return Architecture(
        model_type=model_type,
        hf_class=f"{hf_class}ForCausalLM",
        config=config,
        top=top,
        layer=layer,
        rows=rows,
        norm_offset=norm_offset,
        unsqueezed=frozenset({"ffn_gate_inp_shexp"}),
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _llama_like("llama", "Llama", configs.llama, rows=_HALVES),
        "mistral": _llama_like("mistral", "Mistral", configs.mistral, rows=_HALVES),
        "mixtral": _llama_like(
            "mixtral", "Mixtral", configs.mixtral, _ATTENTION | _NORMS | _MIXTRAL_EXPERTS, rows=_HALVES
        ),
        "qwen2": _llama_like("qwen2", "Qwen2", configs.qwen2),
        "qwen2moe": _llama_like(
            "qwen2_moe", "Qwen2Moe", configs.qwen2moe, _ATTENTION | _NORMS | _EXPERTS | _SHARED_EXPERT
        ),
        "qwen3": _llama_like("qwen3", "Qwen3", configs.qwen3, _LLAMA | _QK_NORMS),
        "qwen3moe": _llama_like("qwen3_moe", "Qwen3Moe", configs.qwen3moe, _ATTENTION | _NORMS | _QK_NORMS | _EXPERTS),
        "gemma": _llama_like("gemma", "Gemma", configs.gemma, norm_offset=1.0),
        "gemma2": _llama_like("gemma2", "Gemma2", configs.gemma2, _GEMMA2, norm_offset=1.0),
        "gemma3": _llama_like("gemma3_text", "Gemma3", configs.gemma3, _GEMMA2 | _QK_NORMS, norm_offset=1.0),
        "phi2": Architecture(
            model_type="phi",
            hf_class="PhiForCausalLM",
            config=configs.phi2,
            top=_TOP | {"output_norm": "model.final_layernorm"},
            layer=_ATTENTION
            | {
                "attn_norm": "input_layernorm",
                "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
        ),
        "phi3": _llama_like(
            "phi3",
            "Phi3",
            configs.phi3,
            _NORMS
            | {
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
        ),
        "stablelm": _llama_like(
            "stablelm",
            "StableLm",
            configs.stablelm,
            _LLAMA | {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"},
        ),
        "starcoder2": _llama_like(
            "starcoder2",
            "Starcoder2",
            configs.starcoder2,
            _ATTENTION | _NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "olmo": _llama_like("olmo", "Olmo", configs.olmo, _ATTENTION | _MLP, top=_UNNORMED_TOP, rows=_HALVES),
        "olmo2": _llama_like("olmo2", "Olmo2", configs.olmo2, _ATTENTION | _MLP | _QK_NORMS | _POST_NORMS),
        "granite": _llama_like("granite", "Granite", configs.granite, rows=_HALVES),
        "command-r": _llama_like(
            "cohere",
            "Cohere",
            configs.command_r,
            _ATTENTION | _MLP | _QK_NORMS | {"attn_norm": "input_layernorm"},
        ),
        "cohere2": _llama_like(
            "cohere2", "Cohere2", configs.cohere2, _ATTENTION | _MLP | {"attn_norm": "input_layernorm"}
        ),
        "smollm3": _llama_like("smollm3", "SmolLM3", configs.smollm3, rows=_HALVES),
        "gpt2": Architecture(
            model_type="gpt2",
            hf_class="GPT2LMHeadModel",
            config=configs.gpt2,
            top=_GPT_TOP,
            layer=_GPT2,
            layer_prefix="transformer.h.",
            transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        ),
        "starcoder": Architecture(
            model_type="gpt_bigcode",
            hf_class="GPTBigCodeForCausalLM",
            config=configs.starcoder,
            top=_GPT_TOP,
            layer=_GPT2,
            layer_prefix="transformer.h.",
        ),
        "gptj": Architecture(
            model_type="gptj",
            hf_class="GPTJForCausalLM",
            config=configs.gptj,
            top={key: name for key, name in _GPT_TOP.items() if key != "position_embd"},
            layer={
                "attn_norm": "ln_1",
                "attn_q": "attn.q_proj",
                "attn_k": "attn.k_proj",
                "attn_v": "attn.v_proj",
                "attn_output": "attn.out_proj",
                "ffn_up": "mlp.fc_in",
                "ffn_down": "mlp.fc_out",
            },
            layer_prefix="transformer.h.",
        ),
        "gptneox": Architecture(
            model_type="gpt_neox",
            hf_class="GPTNeoXForCausalLM",
            config=configs.gptneox,
            top={
                "token_embd": "gpt_neox.embed_in",
                "output_norm": "gpt_neox.final_layer_norm",
                "output": "embed_out",
            },
            layer=_NORMS
            | {
                "attn_qkv": "attention.query_key_value",
                "attn_output": "attention.dense",
                "ffn_up": "mlp.dense_h_to_4h",
                "ffn_down": "mlp.dense_4h_to_h",
            },
            layer_prefix="gpt_neox.layers.",
            rows={"attn_qkv": fused_groups},
        ),
        "bloom": Architecture(
            model_type="bloom",
            hf_class="BloomForCausalLM",
            config=configs.bloom,
            top=_BLOOM_TOP,
            layer=_NORMS | _FUSED,
            layer_prefix="transformer.h.",
            rows={"attn_qkv": fused_groups},
        ),
        "falcon": Architecture(
            model_type="falcon",
            hf_class="FalconForCausalLM",
            config=configs.falcon,
            top=_FALCON_TOP,
            layer=_FUSED | {"attn_norm": "input_layernorm"},
            layer_prefix="transformer.h.",
            rows={"attn_qkv": fused_groups},
        ),
        # The second design of Falcon with two norms; which one it is shows in the tensors.
        "falcon with two norms": Architecture(
            model_type="falcon",
            hf_class="FalconForCausalLM",
            config=configs.falcon,
            top=_FALCON_TOP,
            layer=_FUSED | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
            layer_prefix="transformer.h.",
            rows={"attn_qkv": fused_groups},
        ),
    }
)
