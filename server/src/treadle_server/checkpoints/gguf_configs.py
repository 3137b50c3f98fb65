"""What config.json says of each GGUF architecture, in the words of its Hugging Face model type.

Some settings that Hugging Face knows are constants of the architecture in GGUF; they are constants here.
"""

from __future__ import annotations

import math
from typing import Any

from treadle_server.checkpoints.gguf_rope import rope_config, rotary_dim
from treadle_server.checkpoints.gguf_settings import Settings

Config = dict[str, Any]

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
# The two Gemmas of 27B scale their scores by hidden size over heads, not by the head size; the file does not say so.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA_ACT = "gelu_pytorch_tanh"
_LOCAL_THETA = 10000.0  # of Gemma 3's sliding layers, and all of GPT-J's
_NOPE_INTERVAL = 4  # every fourth layer of SmolLM3 has no positions
_GEMMA2_PATTERN, _GEMMA3_PATTERN, _COHERE2_PATTERN = 2, 6, 4  # one layer of so many sees everything
_OLMO_EPS = 1e-5  # a constant of the model type


def head_sizes(settings: Settings) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and the size of a head."""
    num_heads = settings.uniform("attention.head_count", 0)
    num_kv_heads = settings.uniform("attention.head_count_kv", num_heads)
    if num_heads <= 0 or num_kv_heads <= 0:
        raise settings.unsupported(f"attention.head_count = {num_heads} and head_count_kv = {num_kv_heads}")
    key_length = settings.optional_integer("attention.key_length")
    head_dim = settings.integer("embedding_length") // num_heads if key_length is None else key_length
    settings.require("attention.value_length", head_dim)
    if head_dim <= 0 or head_dim % 2:
        raise settings.unsupported(f"the head size must be an even number over 0, is {head_dim}")
    return num_heads, num_kv_heads, head_dim


def llama(settings: Settings) -> Config:
    """Llama, and the Mistrals without a window."""
    settings.require("expert_count", 0)
    settings.require("expert_used_count", 0)
    biases = {"attention_bias": settings.biased(*_ATTENTION), "mlp_bias": settings.biased(*_FEED_FORWARD)}
    return _rms(settings) | biases


def mistral(settings: Settings) -> Config:
    """Mistral: what GGUF calls llama, with a sliding window."""
    return _rms(settings) | {"sliding_window": settings.integer("attention.sliding_window")}


def mixtral(settings: Settings) -> Config:
    """Mixtral: what GGUF calls llama, with experts."""
    return _rms(settings) | {
        "num_local_experts": settings.num_experts(),
        "num_experts_per_tok": settings.integer("expert_used_count"),
        "sliding_window": settings.optional_integer("attention.sliding_window"),
    }


def qwen2(settings: Settings) -> Config:
    """Qwen 2 and 2.5."""
    return _rms(settings) | {"use_sliding_window": False}


def qwen2moe(settings: Settings) -> Config:
    """Qwen 1.5 and 2 with experts."""
    return _rms(settings) | _experts(settings, normalised=False) | {
        "qkv_bias": settings.biased("attn_q", "attn_k", "attn_v"),
        "shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length"),
    }  # fmt: skip


def qwen3(settings: Settings) -> Config:
    """Qwen 3."""
    return _rms(settings) | {"attention_bias": settings.biased(*_ATTENTION), "use_sliding_window": False}


def qwen3moe(settings: Settings) -> Config:
    """Qwen 3 with experts."""
    bias = {"attention_bias": settings.biased(*_ATTENTION)}
    return _rms(settings) | _experts(settings, normalised=True) | bias


def gemma(settings: Settings) -> Config:
    """Gemma of the first generation."""
    return _rms(settings) | {"hidden_act": _GEMMA_ACT, "hidden_activation": _GEMMA_ACT}


def gemma2(settings: Settings) -> Config:
    """Gemma 2: every second layer slides, scores and logits are capped."""
    return gemma(settings) | _window(settings, _GEMMA2_PATTERN) | {
        "attn_logit_softcapping": settings.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": settings.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(settings),
    }  # fmt: skip


def gemma3(settings: Settings) -> Config:
    """Gemma 3, text only: five sliding layers, then one that sees everything and has its own rotary base."""
    return gemma(settings) | _window(settings, _GEMMA3_PATTERN) | {
        "final_logit_softcapping": settings.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(settings),
        "rope_local_base_freq": settings.optional_number("rope.freq_base_swa") or _LOCAL_THETA,
    }  # fmt: skip


def phi2(settings: Settings) -> Config:
    """Phi 1, 1.5 and 2."""
    return _layer_norm(settings) | {"hidden_act": "gelu_new", "qk_layernorm": False}


def phi3(settings: Settings) -> Config:
    """Phi 3, 3.5 and 4."""
    config = _rms(settings, partial=True) | {
        "sliding_window": settings.optional_integer("attention.sliding_window") or None
    }
    original = settings.optional_integer("rope.scaling.original_context_length") or config["max_position_embeddings"]
    return config | {"original_max_position_embeddings": original}


def stablelm(settings: Settings) -> Config:
    """StableLM 2 and StableLM 3B."""
    settings.skip("use_parallel_residual")  # written as true where nothing was known
    return _layer_norm(settings) | {
        "hidden_act": "silu",
        "qk_layernorm": settings.has_tensor("attn_q_norm.weight"),
        # The feed-forward of a parallel layer has no norm of its own.
        "use_parallel_residual": not settings.has_tensor("ffn_norm.weight"),
        "use_qkv_bias": settings.biased("attn_q", "attn_k", "attn_v"),
    }


def starcoder2(settings: Settings) -> Config:
    """StarCoder 2."""
    config = _layer_norm(settings)
    return config | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config.pop("layer_norm_eps"),
        "sliding_window": settings.optional_integer("attention.sliding_window"),
        "use_bias": settings.biased(*_ATTENTION, "ffn_up", "ffn_down"),
    }


def olmo(settings: Settings) -> Config:
    """OLMo: norms without weights."""
    if settings.optional_number("attention.layer_norm_epsilon") not in (None, _OLMO_EPS):
        raise settings.unsupported(f"attention.layer_norm_epsilon of an olmo must be {_OLMO_EPS}")
    return _rotary(settings) | {
        "attention_bias": settings.biased(*_ATTENTION),
        "clip_qkv": settings.optional_number("attention.clamp_kqv"),
        "hidden_act": "silu",
    }


def olmo2(settings: Settings) -> Config:
    """OLMo 2: norms after attention and feed-forward."""
    return _rms(settings) | {"attention_bias": settings.biased(*_ATTENTION)}


def granite(settings: Settings) -> Config:
    """Granite 3: four multipliers."""
    head_dim = head_sizes(settings)[2]
    return _rms(settings) | {
        "attention_bias": settings.biased(*_ATTENTION),
        "attention_multiplier": settings.optional_number("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": settings.optional_number("embedding_scale") or 1.0,
        "logits_scaling": settings.optional_number("logit_scale") or 1.0,
        "mlp_bias": settings.biased(*_FEED_FORWARD),
        "residual_multiplier": settings.optional_number("residual_scale") or 1.0,
    }


def command_r(settings: Settings) -> Config:
    """Command R."""
    return _cohere(settings) | {"use_qk_norm": settings.has_tensor("attn_q_norm.weight")}


def cohere2(settings: Settings) -> Config:
    """Command R7B and A: three sliding layers with positions, then one that sees everything and has none."""
    return _cohere(settings) | _window(settings, _COHERE2_PATTERN)


def smollm3(settings: Settings) -> Config:
    """SmolLM 3."""
    num_layers = settings.num_layers()
    return _rms(settings) | {
        "attention_bias": settings.biased(*_ATTENTION),
        "mlp_bias": settings.biased(*_FEED_FORWARD),
        "no_rope_layer_interval": _NOPE_INTERVAL,
        "no_rope_layers": [int((layer + 1) % _NOPE_INTERVAL != 0) for layer in range(num_layers)],
        "use_sliding_window": False,
    }


def gpt2(settings: Settings) -> Config:
    """GPT-2."""
    return _gpt(settings) | {"activation_function": "gelu_new"}


def starcoder(settings: Settings) -> Config:
    """StarCoder and SantaCoder: GPT-2 with one key-value head."""
    settings.require("attention.head_count_kv", 1)
    return _gpt(settings) | {
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    }


def gptj(settings: Settings) -> Config:
    """GPT-J."""
    settings.require("rope.freq_base", _LOCAL_THETA)
    return _gpt(settings) | {
        "activation_function": "gelu_new",
        "rotary_dim": rotary_dim(settings, head_sizes(settings)[2]),
    }


def gptneox(settings: Settings) -> Config:
    """GPT-NeoX and Pythia."""
    config = _layer_norm(settings)
    del config["num_key_value_heads"]
    return config | {
        "attention_bias": settings.biased("attn_qkv", "attn_output"),
        "hidden_act": "gelu",
        "rotary_emb_base": config.pop("rope_theta"),
        "rotary_pct": config.pop("partial_rotary_factor"),
        "use_parallel_residual": settings.flag("use_parallel_residual", default=True),
    }


def bloom(settings: Settings) -> Config:
    """BLOOM: ALiBi."""
    sizes = _sizes(settings)
    return {
        **{key: sizes[key] for key in ("vocab_size", "hidden_size", "tie_word_embeddings")},
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
        "n_head": sizes["num_attention_heads"],
        "n_layer": sizes["num_hidden_layers"],
        "seq_length": sizes["max_position_embeddings"],
        "apply_residual_connection_post_layernorm": False,
    }


def falcon(settings: Settings) -> Config:
    """Falcon: one key-value head and one norm in the first design, groups and one or two norms in the second."""
    num_heads, num_kv_heads, head_dim = head_sizes(settings)
    two_norms = settings.has_tensor("attn_norm_2.weight")
    config = _sizes(settings) | rope_config(settings, rotary_dim(settings, head_dim))
    return config | {
        "activation": "gelu",
        "alibi": False,
        "bias": settings.biased("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        "ffn_hidden_size": config.pop("intermediate_size"),
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
        "multi_query": num_kv_heads < num_heads,
        "new_decoder_architecture": two_norms or 1 < num_kv_heads < num_heads,
        "num_kv_heads": num_kv_heads,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": True,
    }


def _sizes(settings: Settings) -> Config:
    settings.require("attention.causal", True)
    settings.skip("vocab_size", "tensor_data_layout")  # the tensors say it
    return {
        "vocab_size": settings.vocab_size(),
        "hidden_size": settings.integer("embedding_length"),
        "intermediate_size": settings.uniform("feed_forward_length", 0),
        "num_hidden_layers": settings.num_layers(),
        "num_attention_heads": head_sizes(settings)[0],
        "max_position_embeddings": settings.integer("context_length"),
        "tie_word_embeddings": not settings.has_tensor("output.weight"),
    }


def _rotary(settings: Settings, *, partial: bool = False) -> Config:
    """What every family with rotary positions says; only some can turn a part of a head's dimensions."""
    _, num_kv_heads, head_dim = head_sizes(settings)
    dim = rotary_dim(settings, head_dim)
    config = _sizes(settings) | {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    if partial:
        config["partial_rotary_factor"] = _fraction(dim, head_dim)
    elif dim != head_dim:
        raise settings.unsupported(
            f"{settings.architecture}.rope.dimension_count = {dim} differs from the head size {head_dim}"
        )
    return config | rope_config(settings, dim)


def _fraction(dim: int, head_dim: int) -> float:
    """Return the factor by which transformers multiplies the head size, and rounds down, to get `dim`."""
    factor = dim / head_dim
    return factor if int(head_dim * factor) == dim else math.nextafter(factor, 1)


def _rms(settings: Settings, *, partial: bool = False) -> Config:
    eps = settings.number("attention.layer_norm_rms_epsilon")
    return _rotary(settings, partial=partial) | {"hidden_act": "silu", "rms_norm_eps": eps}


def _layer_norm(settings: Settings, *, partial: bool = True) -> Config:
    return _rotary(settings, partial=partial) | {"layer_norm_eps": settings.number("attention.layer_norm_epsilon")}


def _gpt(settings: Settings) -> Config:
    """The families that grew out of GPT-2 name their sizes as it does."""
    sizes = _sizes(settings)
    head_sizes(settings)
    return {
        "vocab_size": sizes["vocab_size"],
        "n_embd": sizes["hidden_size"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_positions": sizes["max_position_embeddings"],
        "tie_word_embeddings": sizes["tie_word_embeddings"],
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
    }


def _cohere(settings: Settings) -> Config:
    return _layer_norm(settings, partial=False) | {
        "attention_bias": settings.biased(*_ATTENTION),
        "hidden_act": "silu",
        "logit_scale": settings.number("logit_scale"),
    }


def _window(settings: Settings, default_pattern: int) -> Config:
    """The window, and which layers have it: one number or a truth value a layer in the file, else the default."""
    num_layers = settings.num_layers()
    pattern = settings.value("attention.sliding_window_pattern", default_pattern)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise settings.unsupported(f"attention.sliding_window_pattern = {pattern!r:.60}")
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "sliding_window": settings.integer("attention.sliding_window"),
    }


def _experts(settings: Settings, *, normalised: bool) -> Config:
    """Experts in every layer; whether the chosen ones' weights are made to add up to 1 is fixed by the architecture."""
    settings.require("expert_weights_norm", normalised)
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "norm_topk_prob": normalised,
        "num_experts": settings.num_experts(),
        "num_experts_per_tok": settings.integer("expert_used_count"),
    }


def _query_scalar(settings: Settings) -> int:
    """By the square root of what Gemma divides its scores."""
    num_heads, _, head_dim = head_sizes(settings)
    is_27b = settings.num_layers() == _GEMMA_27B_LAYERS[settings.architecture]
    return settings.integer("embedding_length") // num_heads if is_27b else head_dim
