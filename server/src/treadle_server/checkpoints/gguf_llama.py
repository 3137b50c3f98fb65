"""The `llama` architecture of GGUF as a Hugging Face `LlamaForCausalLM`: its config and where each tensor goes.

llama.cpp rotates neighbouring pairs of a head's dimensions, Hugging Face pairs the two halves. So the rows of q and k
lie in another order in a GGUF file, and are put back here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.checkpoints.gguf_tensors import MappedTensor, to_float32
from treadle_server.errors import CheckpointError, UnsupportedModelError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
_ROPE_FACTORS = "rope_freqs.weight"
# Any other key with the architecture's prefix may change the arithmetic: it is refused by name.
_KNOWN_KEYS = frozenset(
    {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "expert_count", "expert_used_count", "rope.dimension_count",
        "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
    }
)  # fmt: skip
# What Meta's Llama 3.1, 3.2 and 3.3 use; GGUF stores only the resulting factors, and the largest of them is `factor`.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def llama_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a llama GGUF; raises UnsupportedModelError naming a setting that it cannot say."""
    _refuse_unknown_settings(file)
    num_heads = _int(file, "attention.head_count")
    head_dim = _head_dim(file, num_heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _vocab_size(file),
        "hidden_size": _int(file, "embedding_length"),
        "intermediate_size": _int(file, "feed_forward_length"),
        "num_hidden_layers": _int(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(file, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _int(file, "context_length"),
        "rms_norm_eps": _float(file, "attention.layer_norm_rms_epsilon"),
        **_rope_config(file, head_dim),
        "attention_bias": _has_biases(file, _ATTENTION),
        "mlp_bias": _has_biases(file, _FEED_FORWARD),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def llama_tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[MappedTensor]:
    """Yield every tensor under its Hugging Face name; raises UnsupportedModelError for one that has none."""
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue  # said by rope_scaling
        module = name.split(".")[-2] if "." in name else name
        order = None
        if module in num_heads:
            order = _half_split_rows(file, name, num_heads[module], config["head_dim"])
        yield MappedTensor(_hf_name(file, name, config["num_hidden_layers"]), tensor, order)


def _refuse_unknown_settings(file: GgufFile) -> None:
    for key in file.metadata:
        prefix, _, setting = key.partition(".")
        if prefix == "llama" and setting not in _KNOWN_KEYS:
            raise UnsupportedModelError(f"{file.path}: the setting {key} = {file.metadata[key]!r:.60} is not supported")
    if file.get("llama.expert_count", int):
        raise UnsupportedModelError(
            f"{file.path}: mixture-of-experts models cannot be imported from GGUF yet; use the Hugging Face folder"
        )


def _int(file: GgufFile, setting: str) -> int:
    return file.require(f"llama.{setting}", int)


def _float(file: GgufFile, setting: str) -> float:
    """Read a float32 setting as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(file.require(f"llama.{setting}", float))))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing")
    return embedding.shape[0]


def _head_dim(file: GgufFile, num_heads: int) -> int:
    key_length = file.get("llama.attention.key_length", int)
    head_dim = _int(file, "embedding_length") // max(1, num_heads) if key_length is None else key_length
    for setting in ("attention.value_length", "rope.dimension_count"):
        value = file.get(f"llama.{setting}", int)
        if value not in (None, head_dim):
            raise UnsupportedModelError(f"{file.path}: llama.{setting} = {value} differs from the head size {head_dim}")
    if head_dim <= 0 or head_dim % 2:
        raise CheckpointError(f"{file.path}: the head size must be an even number over 0, is {head_dim}")
    return head_dim


def _num_kv_heads(file: GgufFile, num_heads: int) -> int:
    """One number, or a list with one a layer, which must agree."""
    value = file.metadata.get("llama.attention.head_count_kv", num_heads)
    counts = set(value) if isinstance(value, list) else {value}
    if len(counts) != 1 or type(count := counts.pop()) is not int:
        raise UnsupportedModelError(f"{file.path}: llama.attention.head_count_kv = {value!r:.60} must be one number")
    return count


def _has_biases(file: GgufFile, modules: tuple[str, ...]) -> bool:
    """True when all of the modules have biases; Hugging Face's config cannot say that only some have."""
    names = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
    present = [module for module in modules if f"{module}.bias" in names]
    if present and len(present) != len(modules):
        raise UnsupportedModelError(
            f"{file.path}: biases on {', '.join(present)} but not on all of {', '.join(modules)}"
        )
    return bool(present)


def _hf_name(file: GgufFile, name: str, num_layers: int) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP and parts[1] == "weight":
        return f"{_TOP[parts[0]]}.weight"
    is_layer = len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and int(parts[1]) < num_layers
    if is_layer and parts[2] in _LAYER and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    raise UnsupportedModelError(f"{file.path}: a llama of {num_layers} layers has no tensor {name!r}")


def _half_split_rows(file: GgufFile, name: str, num_heads: int, head_dim: int) -> np.ndarray:
    """int64 [num_heads * head_dim]: for each row in half-split order, where it lies among the interleaved pairs."""
    num_rows, expected = file.tensors[name].shape[0], num_heads * head_dim
    if num_rows != expected:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has {num_rows} rows, {num_heads} heads of {head_dim} need {expected}"
        )
    pairs = np.arange(num_rows).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _rope_config(file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = _float(file, "rope.freq_base") if "llama.rope.freq_base" in file.metadata else 10000.0
    scaling = _linear_scaling(file)
    if _ROPE_FACTORS in file.tensors:
        if scaling:
            raise UnsupportedModelError(
                f"{file.path}: linear rope scaling and {_ROPE_FACTORS} together are not supported"
            )
        scaling = _llama3_scaling(file, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _linear_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.get("llama.rope.scaling.type", str)
    old_factor = file.get("llama.rope.scale_linear", float)  # how files before the `scaling` keys said it
    if kind == "linear" or (kind is None and old_factor not in (None, 1.0)):
        factor = old_factor if kind is None else _float(file, "rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor}
    if kind in (None, "none"):
        return None
    raise UnsupportedModelError(
        f"{file.path}: llama.rope.scaling.type = {kind!r} is not supported; supported are none and linear"
    )


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Name the llama3 scaling whose factors the file stores; raises UnsupportedModelError for others."""
    stored = to_float32(file.tensors[_ROPE_FACTORS])
    factor = float(stored.max())
    original = file.get("llama.rope.scaling.original_context_length", int) or _LLAMA3_ORIGINAL
    expected = _llama3_factors(theta, head_dim, factor, original)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedModelError(
            f"{file.path}: the factors in {_ROPE_FACTORS} are not those of llama3 scaling by {factor}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """float64 [head_dim / 2], by what each frequency is divided (modeling_rope_utils of transformers)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
