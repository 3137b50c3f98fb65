"""Every architecture that GGUF has: a random model laid out as llama.cpp's converter does comes back the same.

The writer goes from Hugging Face's names to GGUF's by the `gguf` package's own map; the importer has its own table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from treadle_plugin_api.backend import Batch
from treadle_server.checkpoints.gguf_architectures import ARCHITECTURES
from treadle_server.checkpoints.gguf_import import import_gguf
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.decoder import Decoder

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
GELU_TANH = "gelu_pytorch_tanh"
# What all converters write, if the model's config has it under one of these names.
COMMON_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd", "n_embed"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("ffn_hidden_size", "intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.sliding_window_pattern": ("sliding_window_pattern",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "rope.freq_base": ("rope_theta", "rotary_emb_base"),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "rope.dimension_count": ("rotary_dim",),
    "use_parallel_residual": ("use_parallel_residual",),
}
FLOATS = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale", "attention.clamp_kqv")


YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 8.0, "beta_slow": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A golden model, and what differs in it because GGUF could not say it otherwise."""

    model: str
    arch: MODEL_ARCH
    changes: Mapping[str, Any] = field(default_factory=dict)


CASES = [
    Case("llama_bias_headdim", MODEL_ARCH.LLAMA),
    Case("llama_tied_gqa", MODEL_ARCH.LLAMA),
    Case("llama_mqa_bf16", MODEL_ARCH.LLAMA),
    Case("llama_rope_linear", MODEL_ARCH.LLAMA),
    Case("llama_rope_yarn", MODEL_ARCH.LLAMA),
    Case("llama_rope_yarn_factor", MODEL_ARCH.LLAMA, {"rope_scaling": YARN}),
    Case("llama_rope_llama3", MODEL_ARCH.LLAMA),
    Case("llama_rope_longrope", MODEL_ARCH.LLAMA),
    Case("mistral_sw8", MODEL_ARCH.LLAMA),
    Case("mixtral", MODEL_ARCH.LLAMA),
    Case("mixtral_window", MODEL_ARCH.LLAMA),
    Case("qwen2", MODEL_ARCH.QWEN2),
    Case("qwen2_moe", MODEL_ARCH.QWEN2MOE),
    Case("qwen3", MODEL_ARCH.QWEN3),
    Case("qwen3_moe", MODEL_ARCH.QWEN3MOE),
    Case("gemma", MODEL_ARCH.GEMMA, {"hidden_act": GELU_TANH, "hidden_activation": GELU_TANH}),
    Case("gemma2", MODEL_ARCH.GEMMA2, {"query_pre_attn_scalar": 12}),
    Case("gemma3", MODEL_ARCH.GEMMA3, {"query_pre_attn_scalar": 32}),
    Case("gemma3_scaled", MODEL_ARCH.GEMMA3, {"query_pre_attn_scalar": 12}),
    Case("phi", MODEL_ARCH.PHI2, {"partial_rotary_factor": 0.5}),
    Case("phi3", MODEL_ARCH.PHI3),
    Case("phi3_partial", MODEL_ARCH.PHI3),
    Case("phi3_longrope", MODEL_ARCH.PHI3),
    Case("stablelm", MODEL_ARCH.STABLELM),
    Case("stablelm_parallel", MODEL_ARCH.STABLELM),
    Case("stablelm_qk_norm", MODEL_ARCH.STABLELM),
    Case("starcoder2", MODEL_ARCH.STARCODER2),
    Case("starcoder2_no_bias", MODEL_ARCH.STARCODER2),
    Case("gpt_bigcode", MODEL_ARCH.STARCODER),
    Case("olmo", MODEL_ARCH.OLMO),
    Case("olmo_tied", MODEL_ARCH.OLMO),
    Case("olmo2", MODEL_ARCH.OLMO2),
    Case("granite", MODEL_ARCH.GRANITE),
    Case("granite_bias", MODEL_ARCH.GRANITE),
    Case("cohere", MODEL_ARCH.COMMAND_R),
    Case("cohere_qk_norm", MODEL_ARCH.COMMAND_R),
    Case("cohere2", MODEL_ARCH.COHERE2),
    Case("smollm3", MODEL_ARCH.SMOLLM3, {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}),
    Case("gpt2", MODEL_ARCH.GPT2),
    Case("gptj", MODEL_ARCH.GPTJ),
    Case("gpt_neox", MODEL_ARCH.GPTNEOX),
    Case("gpt_neox_sequential", MODEL_ARCH.GPTNEOX),
    Case("gpt_neox_no_bias", MODEL_ARCH.GPTNEOX),
    Case("bloom", MODEL_ARCH.BLOOM),
    Case("falcon_7b", MODEL_ARCH.FALCON),
    Case("falcon_new", MODEL_ARCH.FALCON),
    Case("falcon_new_one_norm", MODEL_ARCH.FALCON),
    Case("falcon_parallel_mha", MODEL_ARCH.FALCON),
]
# Where one model says nothing new of an architecture, its other variants still may: every entry has a case.
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)


def read_config(golden: Path, case: Case) -> Config:
    """The golden model's config in transformers 4's words, changed as the case says."""
    config: Config = json.loads((golden / "models" / case.model / "config.v4.json").read_text(encoding="utf-8"))
    return config | dict(case.changes)


def first_of(config: Config, *keys: str) -> Any:
    """The first value that is there; a size of 0 is none."""
    values = [config.get(key) for key in keys]
    return next((value for value in values if value is not None and (value is False or value != 0)), None)


def metadata(config: Config, arch: MODEL_ARCH) -> dict[str, Any]:
    """The keys that converters write, without the tokenizer's."""
    name = gguf.MODEL_ARCH_NAMES[arch]
    values = {key: first_of(config, *names) for key, names in COMMON_KEYS.items()}
    hidden, num_heads = values["embedding_length"], values["attention.head_count"]
    head_dim = config.get("head_dim") or hidden // num_heads
    values["context_length"] = values["context_length"] or 2048
    values["feed_forward_length"] = values["feed_forward_length"] or 4 * hidden
    if config["model_type"] == "olmo":
        values["attention.layer_norm_epsilon"] = 1e-5
    if config["model_type"] == "gpt_bigcode":
        values["attention.head_count_kv"] = 1
    if config["model_type"] == "falcon":
        values["attention.head_count_kv"] = config.get("num_kv_heads") or (1 if config["multi_query"] else num_heads)
    if (fraction := first_of(config, "partial_rotary_factor", "rotary_pct")) is not None:
        values["rope.dimension_count"] = int(fraction * head_dim)
    values |= rope_metadata(config)
    values |= {key: float(values[key]) for key in FLOATS if values[key] is not None}
    return {f"{name}.{key}": value for key, value in values.items() if value is not None}


def rope_metadata(config: Config) -> dict[str, Any]:
    """The keys of a rope scaling."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    original = first_of(scaling, "original_max_position_embeddings") or config.get("original_max_position_embeddings")
    values: dict[str, Any] = {"rope.scaling.original_context_length": original}
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
        values |= {f"rope.scaling.yarn_{key}": scaling.get(key) for key in ("beta_fast", "beta_slow")}
    if kind == "longrope":
        values["rope.scaling.type"] = kind
        scale = config["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return values


def rope_tensors(config: Config) -> Tensors:
    """The tensors of a llama3 or longrope scaling."""
    scaling = config.get("rope_scaling") or {}
    if "long_factor" in scaling:
        return {f"rope_factors_{k}.weight": np.array(scaling[f"{k}_factor"], np.float32) for k in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    factors = np.where(smooth > 1, 1, np.where(smooth < 0, scaling["factor"], between))
    return {"rope_freqs.weight": factors.astype(np.float32)}


def interleaved(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows whose pairs lie in two halves of each head -> rows whose pairs are neighbours."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def unmixed(array: np.ndarray, num_groups: int, group: int, head_dim: int) -> np.ndarray:
    """Rows of groups (queries, a key, a value) -> all queries, all keys, all values."""
    heads = array.reshape(num_groups, group + 2, head_dim, *array.shape[1:])
    parts = heads[:, :group], heads[:, group], heads[:, group + 1]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def converted(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """What the converter of the model's type does to one tensor."""
    kind = config["model_type"]
    num_heads = first_of(config, "num_attention_heads", "n_head")
    num_kv_heads = first_of(config, "num_kv_heads", "num_key_value_heads") or num_heads
    if kind in ("llama", "mistral", "mixtral", "olmo", "granite", "smollm3"):
        if ".q_proj." in name:
            return interleaved(array, num_heads)
        return interleaved(array, num_kv_heads) if ".k_proj." in name else array
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return array + np.float32(1)
    if "query_key_value" in name:
        if kind == "falcon":
            num_kv_heads = config.get("num_kv_heads") or (1 if config["multi_query"] else num_heads)
        return unmixed(array, num_kv_heads, num_heads // num_kv_heads, array_head_dim(config))
    if kind == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
        return array.T
    return array[0] if name.endswith("shared_expert_gate.weight") else array


def array_head_dim(config: Config) -> int:
    """The size of a head of a model with fused queries, keys and values."""
    return int(first_of(config, "hidden_size", "n_embed") // first_of(config, "num_attention_heads", "n_head"))


def merged_name(name: str) -> str:
    """The name by which gguf's map knows all experts of a layer, or all heads' norms, as one tensor."""
    name = re.sub(r"\.norms\.\d+\.", ".", name)
    name = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.\d+\.", r"\1.feed_forward.experts.", name)
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def stacked(tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, and for all heads' norms."""
    result = {name: array for name, array in tensors.items() if merged_name(name) == name}
    groups: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors.keys() - result.keys(), key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        groups.setdefault(merged_name(name), []).append(tensors[name])
    return result | {name: np.stack(arrays) for name, arrays in groups.items()}


def gguf_tensors(tensors: Tensors, config: Config, arch: MODEL_ARCH) -> Tensors:
    """All tensors of the file under GGUF's names."""
    num_layers = first_of(config, "num_hidden_layers", "n_layer")
    names = gguf.get_tensor_name_map(arch, num_layers)
    laid_out = stacked({name: converted(name, array, config) for name, array in tensors.items()})
    result = {}
    for name, array in laid_out.items():
        new = names.get_name(name, (".weight", ".bias"))
        new = new or names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
        assert new is not None, name
        result[new] = np.ascontiguousarray(array)
    return result | rope_tensors(config)


def write_model(golden: Path, case: Case, path: Path) -> Tensors:
    """Write the golden model as GGUF and return its tensors, float32."""
    config = read_config(golden, case)
    stored = load_file(golden / "models" / case.model / "model.safetensors")
    tensors = {name: array.astype(np.float32) for name, array in stored.items()}
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata(config, case.arch).items():
        add[type(value)](key, value)
    add_tokenizer(writer, config["vocab_size"])
    for name, array in gguf_tensors(tensors, config, case.arch).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    """A byte-level vocabulary with one merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"<{number}>" for number in range(num_tokens - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if len(token) > 2 else 1 for token in tokens])
    writer.add_token_merges(["a b"])


@pytest.fixture
def convert(golden: Path, tmp_path: Path) -> Callable[[Case], tuple[Path, Tensors]]:
    """Writes a case as GGUF, imports that, and returns the folder and the tensors it was made of."""

    def convert(case: Case) -> tuple[Path, Tensors]:
        tensors = write_model(golden, case, tmp_path / "model.gguf")
        folder = tmp_path / "imported"
        folder.mkdir()
        import_gguf(tmp_path / "model.gguf", folder)
        return folder, tensors

    return convert


def logits(folder: Path) -> np.ndarray:
    """float32 [tokens, vocab] for forty tokens, past every window and short context of the golden models."""
    with load_checkpoint(folder) as checkpoint:
        decoder = Decoder(checkpoint.config, checkpoint.params)
        ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 40)
        batch = Batch(ids, starts=np.array([0, len(ids)]), prefix_lengths=np.array([0]))
        return decoder.head(decoder.forward(batch, None))


@by_name
def test_tensors_come_back_under_their_own_names(convert: Callable[..., Any], case: Case) -> None:
    """Names, shapes and numbers are the original's: rows in order, experts apart, norms without the one added."""
    folder, tensors = convert(case)
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        # Adding one and taking it off again costs up to half a unit in the last place of two.
        tolerance = 2.0**-23 if case.model.startswith("gemma") and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(loaded[name].astype(np.float32), array, rtol=0, atol=tolerance, err_msg=name)


@by_name
def test_the_imported_model_computes_the_same(
    convert: Callable[..., Any], golden: Path, tmp_path: Path, case: Case
) -> None:
    """Logits equal those of the original folder: every setting arrived."""
    folder, _ = convert(case)
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps(read_config(golden, case)), encoding="utf-8")
    (original / "model.safetensors").symlink_to(golden / "models" / case.model / "model.safetensors")
    tolerance = 1e-5 if case.model.startswith("gemma") else 0
    np.testing.assert_allclose(logits(folder), logits(original), rtol=tolerance, atol=tolerance)


def test_every_architecture_has_a_case() -> None:
    """No entry of the table is left out above."""
    covered = {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES}
    assert covered == {name for name in ARCHITECTURES if name in gguf.MODEL_ARCH_NAMES.values()}


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) & set(gguf.MODEL_ARCH_NAMES.values())))
def test_names_are_those_of_the_gguf_package(name: str) -> None:
    """Each name on the left is a tensor that the gguf package gives the architecture."""
    arch = next(arch for arch, arch_name in gguf.MODEL_ARCH_NAMES.items() if arch_name == name)
    known = {gguf.TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in gguf.MODEL_TENSORS[arch]}
    entry = ARCHITECTURES[name]
    assert {*entry.top, *entry.layer} - known <= {"output"}  # an untied head, where converters tie it


def test_single_experts_of_old_files(golden: Path, tmp_path: Path) -> None:
    """Files that hold each expert by itself give the same tensors."""
    case = next(case for case in CASES if case.model == "mixtral")
    path, folder = tmp_path / "old.gguf", tmp_path / "imported"
    folder.mkdir()
    apart = gguf_tensors

    def unstack(tensors: Tensors, config: Config, arch: MODEL_ARCH) -> Tensors:
        result = {}
        for name, array in apart(tensors, config, arch).items():
            if "_exps" not in name:
                result[name] = array
            else:
                result |= {name.replace("_exps", f".{expert}"): each for expert, each in enumerate(array)}
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "gguf_tensors", unstack)
        tensors = write_model(golden, case, path)
    import_gguf(path, folder)
    loaded = load_file(folder / "model.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in tensors.items())
    assert loaded.keys() == tensors.keys()
