"""The model before its first step: a small llama, as a Hugging Face folder that treadle's trainer loads.

Dimension letters: `dim` 192, `heads` 6, `kv_heads` 2, `head_dim` 32, `hidden` 512, `vocab` 2048.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from stories.tokenizer import tokenizer_config

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 512
NUM_LAYERS = 4
DIM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN_DIM = 192, 6, 2, 32, 512
DEVIATION = 0.02  # as GPT-2 (Radford et al. 2019), outputs into the residual stream divided by its square root of terms
SEED = 0


def config() -> dict[str, object]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": DIM,
        "intermediate_size": HIDDEN_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def generation_config() -> dict[str, object]:
    """Return generation_config.json: cool enough that sentences stay whole, warm enough that no two stories agree."""
    return {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 256, "bos_token_id": 0, "eos_token_id": 1}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape, matrices `[out, in]`, in the order that they are drawn in."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, DIM)}
    for layer in range(NUM_LAYERS):
        own = {
            "input_layernorm": (DIM,),
            "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, DIM),
            "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, DIM),
            "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, DIM),
            "self_attn.o_proj": (DIM, NUM_HEADS * HEAD_DIM),
            "post_attention_layernorm": (DIM,),
            "mlp.gate_proj": (HIDDEN_DIM, DIM),
            "mlp.up_proj": (HIDDEN_DIM, DIM),
            "mlp.down_proj": (DIM, HIDDEN_DIM),
        }
        result |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return result | {"model.norm.weight": (DIM,)}


def initial_tensors() -> dict[str, NDArray[np.float32]]:
    """Return the tensors that training starts from: norms 1, everything else normal."""
    rng = np.random.default_rng(SEED)
    into_residual = DEVIATION / math.sqrt(2 * NUM_LAYERS)
    tensors = {}
    for name, shape in shapes().items():
        deviation = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else DEVIATION
        drawn = np.ones(shape) if len(shape) == 1 else deviation * rng.standard_normal(shape)
        tensors[name] = drawn.astype(np.float32)
    return tensors


def write_start(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the model that training starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(initial_tensors(), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(CONTEXT_LENGTH))
    write_json(folder / "config.json", config())
    write_json(folder / "generation_config.json", generation_config())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that a person can read."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n")
