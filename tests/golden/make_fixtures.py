"""Makes the reference models and outputs of this folder with transformers.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/golden/make_fixtures.py [NAME ...]

Without names it makes those that are missing; a named one is made anew. Nothing here runs in the test suite.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from variants import ABSENT, VARIANTS, Variant

HERE = Path(__file__).parent
TOKENIZER = HERE / "models" / "llama_plain"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LENGTHS = (1, 5, 40)
NUM_GREEDY = 24
CACHED_LENGTH, CACHED_PROMPTS = 30, (10, 20)
"""Tokens of the runs that cross a rotary limit of 16, and the two prompt lengths: one below it, one past it."""
MIN_MARGIN, MIN_DISTINCT, MAX_ERROR = 2e-3, 8, 1.4e-5
"""A seed is taken when no greedy choice is closer than this, so many differ, and float32 errs by less than this."""

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
V4_TIED_BY_DEFAULT = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon"} | {
    "gemma",
    "gemma2",
    "cohere",
    "cohere2",
}
"""transformers 4 left `tie_word_embeddings` out of the files of these when it was true."""


def models(variant: Variant, name: str) -> Iterator[PreTrainedModel]:
    """Yield the model with its parameters drawn from one seed after another."""
    config = AutoConfig.for_model(variant.family, **{**SIZES, **copy.deepcopy(dict(variant.config))})
    how = {"attn_implementation": variant.attention}
    if hasattr(config, "num_experts_per_tok"):
        how["experts_implementation"] = "eager"
    for seed in range(100):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **how).eval()
        draw_parameters(model, np.random.default_rng([zlib.crc32(name.encode()), seed]), variant.gain)
        yield model


@torch.no_grad()
def draw_parameters(model: PreTrainedModel, rng: np.random.Generator, gain: float) -> None:
    """Draw every parameter far from its default: norms within 0.5 of it, biases up to 0.3, products of unit scale."""
    # A tied embedding is small, or the residual stream would make every token predict itself.
    embedding_scale = 0.15 if model.config.tie_word_embeddings else 0.6
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith("bias"):
            values = rng.uniform(-0.3, 0.3, shape)
        elif len(shape) == 1 or "norm" in name:
            values = parameter.numpy() + rng.uniform(-0.5, 0.5, shape)
        elif is_embedding(model, name):
            values = rng.normal(0, embedding_scale, shape)
        else:
            values = rng.normal(0, gain / np.sqrt(shape[-1]), shape)
        parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def is_embedding(model: PreTrainedModel, name: str) -> bool:
    """Tell whether the parameter is a table of rows."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding)


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return `[tokens, vocab]` of one pass; on a copy, since dynamic rotary angles remember the longest pass."""
    fresh = copy.deepcopy(model).to(dtype)
    return fresh(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()


@torch.no_grad()
def cached_logits(model: PreTrainedModel, ids: np.ndarray, prompt_length: int) -> np.ndarray:
    """Return `[tokens, vocab]`: the prompt in one pass, then every token alone over the cache."""
    fresh, cache, rows = copy.deepcopy(model), None, []
    for start, stop in itertools.pairwise([0, *range(prompt_length, len(ids) + 1)]):
        output = fresh(torch.from_numpy(ids[start:stop])[None], cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.logits[0].numpy())
    return np.concatenate(rows)


def greedy(model: PreTrainedModel, prompt: np.ndarray, *, cached: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids chosen after the prompt, and by how much each choice beat the next best."""
    ids, margins = prompt, []
    for _ in range(NUM_GREEDY):
        row = (cached_logits(model, ids, len(prompt)) if cached else full_logits(model, ids))[-1]
        second, first = np.sort(row)[-2:]
        margins.append(first - second)
        ids = np.append(ids, row.argmax())
    return ids[len(prompt) :], np.array(margins, np.float32)


def reference_outputs(model: PreTrainedModel, variant: Variant) -> dict[str, np.ndarray]:
    """Return the arrays of one parity file."""
    rng, arrays = np.random.default_rng(7), {}
    for length in LENGTHS:
        arrays[f"ids_{length}"] = rng.integers(3, SIZES["vocab_size"], length)
        arrays[f"logits_{length}"] = full_logits(model, arrays[f"ids_{length}"])
    longest = LENGTHS[-1]
    exact = full_logits(model, arrays[f"ids_{longest}"], torch.float64)
    arrays["f32_error"] = np.abs(exact - arrays[f"logits_{longest}"]).max()
    arrays["greedy_ids"], arrays["greedy_margin"] = greedy(model, arrays["ids_5"], cached=False)
    arrays["greedy_cached_ids"], cached_margin = greedy(model, arrays["ids_5"], cached=True)
    if variant.crosses_limit:
        arrays |= crossing_outputs(model, arrays["ids_40"][:CACHED_LENGTH], cached_margin)
    elif not np.array_equal(arrays["greedy_ids"], arrays["greedy_cached_ids"]):
        raise ValueError("cached decoding differs from full passes, though no angle depends on the length")
    return arrays


def crossing_outputs(model: PreTrainedModel, ids: np.ndarray, margin: np.ndarray) -> dict[str, np.ndarray]:
    """Return the logits of cached decoding that crosses the limit of the rotary angles."""
    below, past = (cached_logits(model, ids, length) for length in CACHED_PROMPTS)
    return {
        "cached_ids": ids,
        "cached_prompts": np.array(CACHED_PROMPTS),
        "cached_logits": below,
        "cached_logits_long_prompt": past,
        "greedy_cached_margin": margin,
    }


def is_sharp(arrays: Mapping[str, np.ndarray]) -> bool:
    """Tell whether greedy choices are clear and varied, and float32 is accurate."""
    margins = [values.min() for key, values in arrays.items() if key.endswith("margin")]
    is_varied = len(set(arrays["greedy_ids"].tolist())) >= MIN_DISTINCT
    return min(margins) > MIN_MARGIN and is_varied and bool(arrays["f32_error"] < MAX_ERROR)


def older_spelling(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the config as transformers 4 wrote it."""
    old = {key: value for key, value in config.items() if key not in ("dtype", "rope_parameters")}
    old |= {"torch_dtype": config["dtype"], "transformers_version": "4.51.3"}
    if variant.family != "smollm3":  # the one family that had it from its first day
        old.pop("layer_types", None)
    if old["tie_word_embeddings"] and variant.family in V4_TIED_BY_DEFAULT:
        del old["tie_word_embeddings"]
    old |= older_rotary(config.get("rope_parameters"), variant)
    old |= variant.v4
    return {key: value for key, value in sorted(old.items()) if value is not ABSENT}


def older_rotary(parameters: Mapping[str, Any] | None, variant: Variant) -> dict[str, Any]:
    """Return the keys that `rope_parameters` replaced."""
    if not parameters:
        return {}
    if "sliding_attention" in parameters:
        local = parameters["sliding_attention"]["rope_theta"]
        return {**older_rotary(parameters["full_attention"], variant), "rope_local_base_freq": local}
    scaling = dict(parameters)
    is_neox = variant.family == "gpt_neox"
    base, part = ("rotary_emb_base", "rotary_pct") if is_neox else ("rope_theta", "partial_rotary_factor")
    old = {base: scaling.pop("rope_theta")}
    if "partial_rotary_factor" in scaling:
        old[part] = scaling.pop("partial_rotary_factor")
    scaling_kind = scaling.pop("rope_type")
    if variant.family == "phi3":  # beside rope_scaling in its files
        scaling.pop("original_max_position_embeddings", None)
    return {**old, "rope_scaling": None if scaling_kind == "default" else {**scaling, variant.rope_key: scaling_kind}}


def check_spelling(folder: Path, old: Mapping[str, Any], attention: str, expected: Mapping[str, np.ndarray]) -> None:
    """Raise unless transformers computes the same from the older config file."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(old))
        config: PretrainedConfig = AutoConfig.from_pretrained(scratch)
    again = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation=attention)
    error = np.abs(full_logits(again.eval(), expected["ids_40"]) - expected["logits_40"]).max()
    if error > MAX_ERROR:
        raise ValueError(f"config.v4.json of {folder.name} describes another model: {error}")


def make(name: str, variant: Variant) -> None:
    """Write the folder and the outputs of one reference model."""
    for model in models(variant, name):
        arrays = reference_outputs(model, variant)
        if is_sharp(arrays):
            break
    else:
        raise ValueError(f"no seed gives {name} clear greedy choices")
    tokenizer = {file: (TOKENIZER / file).read_bytes() for file in TOKENIZER_FILES}
    folder = HERE / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    (model.base_model if variant.bare else model).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    old = older_spelling(json.loads((folder / "config.json").read_text()), variant)
    check_spelling(folder, old, variant.attention, arrays)
    (folder / "config.v4.json").write_text(json.dumps(old, indent=2) + "\n")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    for file, data in tokenizer.items():
        (folder / file).write_bytes(data)
    np.savez_compressed(HERE / "parity" / f"{name}.npz", **arrays)
    margin = arrays["greedy_margin"].min()
    print(f"{name}: float32 error {arrays['f32_error']:.1e}, least margin {margin:.4f}", flush=True)


def main() -> None:
    """Make the named reference models, or all that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*VARIANTS, []])
    names = parser.parse_args().names or [name for name in VARIANTS if not (HERE / "models" / name).exists()]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        make(name, VARIANTS[name])


if __name__ == "__main__":
    main()
