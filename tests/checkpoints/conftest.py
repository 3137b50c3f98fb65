"""A tiny random llama and its byte-level tokenizer, as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS, CONTEXT = 64, 4, 2, 16, 96, 2, 128
SPECIALS = ["<pad>", "<s>", "</s>", "<tool>"]
WORDS = ["The cat sat on the mat, 1234 times.", "It's theirs; they'll see.\n\n  Indented  text", "Ünïcode and 数字 12"]


@dataclass(frozen=True)
class TinyLlama:
    """The tensors under their Hugging Face names, float32, and the tokenizer's vocabulary and merges."""

    tensors: Mapping[str, np.ndarray]
    vocabulary: Mapping[str, int]
    merges: list[tuple[str, str]]


@dataclass
class GgufRequest:
    """How a GGUF file is to be written: changed metadata keys (None drops one), added tensors, numbers' types."""

    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)


@pytest.fixture(scope="session")
def tiny_llama() -> TinyLlama:
    """A llama whose weights are exact in every float type, and a tokenizer trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return TinyLlama(_random_tensors(len(model["vocab"])), model["vocab"], merges)


@pytest.fixture
def write_gguf(tiny_llama: TinyLlama, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny llama as llama.cpp's converter lays it out; arguments are those of GgufRequest."""

    def write(name: str = "Tiny-Llama.Q4_0.gguf", **request: Any) -> Path:
        return _write_gguf(tmp_path / name, tiny_llama, GgufRequest(**request))

    return write


@pytest.fixture
def tiny_folder(tiny_llama: TinyLlama, tmp_path: Path) -> Path:
    """A Hugging Face folder, with files in it that must not be copied."""
    folder = tmp_path / "Tiny Folder"
    folder.mkdir()
    save_file(dict(tiny_llama.tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(len(tiny_llama.vocabulary))))
    Tokenizer(models.BPE(dict(tiny_llama.vocabulary), tiny_llama.merges)).save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA card.\n")
    (folder / "modeling.py").write_text("raise SystemExit\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def hf_config(vocab_size: int) -> dict[str, Any]:
    """The config.json of the tiny llama."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip


def _random_tensors(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        # Multiples of 1/64 under 2 have 7 bits: exact in F32, F16 and BF16.
        return (rng.integers(-127, 128, shape) / 64).astype(np.float32)

    tensors = {"model.embed_tokens.weight": numbers(vocab_size, HIDDEN), "model.norm.weight": numbers(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN), "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": numbers(*shape) for name, shape in shapes.items()}
    return tensors


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection as llama.cpp's converter does."""
    halves = rows.reshape(num_heads, 2, HEAD_DIM // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under their GGUF names, q and k rows interleaved."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    renamed = {}
    for name, array in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        renamed[names.get_name(name, (".weight", ".bias"))] = array if heads is None else interleave(array, heads)
    return renamed


def _write_gguf(path: Path, llama: TinyLlama, request: GgufRequest) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (_metadata(llama) | request.metadata).items():
        if value is not None:
            _add_value(writer, key, value)
    for name, array in (gguf_tensors(llama.tensors) | request.tensors).items():
        if array is not None:
            _add_tensor(writer, name, array, request.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """Write matrices in the given type, vectors in float32, and integers as they are."""
    if array.dtype != np.float32:
        writer.add_tensor(name, array)
        return
    kind = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _metadata(llama: TinyLlama) -> dict[str, Any]:
    tokens = sorted(llama.vocabulary, key=lambda token: llama.vocabulary[token])
    types = {"<tool>": 4} | dict.fromkeys(SPECIALS[:3], 3)
    return {
        "general.license": "apache-2.0", "llama.context_length": CONTEXT, "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS, "llama.feed_forward_length": FEED_FORWARD, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": HEAD_DIM, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in llama.merges], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)
