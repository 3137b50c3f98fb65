"""Adapters: what PEFT saved is read to the bit and gives PEFT's logits; what cannot be computed is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_plugin_api.backend import Adapter, Batch, LowRank
from treadle_server.checkpoints.adapters import merge_adapter, modules_of, read_adapter, target_names, write_adapter
from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.errors import CheckpointError, UnsupportedModelError
from treadle_server.model.decoder import Decoder

ALL = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
MODELS = ["falcon_new", "gpt2", "gpt_neox", "llama_plain", "phi3"]


@pytest.fixture
def open_model(golden: Path) -> Callable[[str], Checkpoint]:
    """Opens a reference model by name."""
    return lambda name: load_checkpoint(golden / "models" / name)


@pytest.fixture
def adapter_folder(golden: Path, tmp_path: Path) -> Path:
    """A copy of llama's adapter, to be spoilt."""
    return shutil.copytree(golden / "adapters" / "llama_plain", tmp_path / "adapter")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of an adapter's file."""
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    found = {name: np.array(file.map(name)) for name in file.tensors}
    file.close()
    return found


def configure(folder: Path, **settings: Any) -> None:
    """Change settings of an adapter."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def logits(decoder: Decoder, ids: np.ndarray, adapter: Adapter | None = None) -> np.ndarray:
    """Return `[tokens, vocab]`."""
    return decoder.head(decoder.forward(Batch.of([ids], adapters=[adapter])))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_peft(golden: Path, open_model: Any, name: str) -> None:
    """In float64, beside the model and merged into it."""
    reference = np.load(golden / "adapters" / f"{name}.npz")
    with open_model(name) as checkpoint:
        adapter = read_adapter(golden / "adapters" / name, checkpoint, np.float64)
        decoder = Decoder(checkpoint.config, checkpoint.params, dtype="float64")
        merged = Decoder(checkpoint.config, merge_adapter(checkpoint.params, adapter), dtype="float64")
    assert np.abs(logits(decoder, reference["ids"]) - reference["logits"]).max() > 0.1
    np.testing.assert_allclose(logits(decoder, reference["ids"], adapter), reference["logits"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(logits(merged, reference["ids"]), reference["logits"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_and_written_is_what_was_there(golden: Path, open_model: Any, tmp_path: Path, name: str) -> None:
    """The same tensors under the same names, to the bit, and the same scales."""
    folder = golden / "adapters" / name
    with open_model(name) as checkpoint:
        adapter = read_adapter(folder, checkpoint)
        write_adapter(tmp_path, adapter, checkpoint)
        again = read_adapter(tmp_path, checkpoint, name=adapter.name)
    before, after = tensors_of(folder), tensors_of(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert {name: delta.scale for name, delta in adapter.deltas.items()} == pytest.approx(
        {name: delta.scale for name, delta in again.deltas.items()}, rel=1e-15
    )
    assert again.name == adapter.name == name


def test_ranks_and_alphas_of_their_own_are_written(golden: Path, open_model: Any, tmp_path: Path) -> None:
    """As patterns of whole names, which PEFT reads."""
    with open_model("phi3") as checkpoint:
        write_adapter(tmp_path, read_adapter(golden / "adapters" / "phi3", checkpoint), checkpoint)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 3)
    assert settings["rank_pattern"] == {
        f"^model.layers.{n}.self_attn.o_proj": 5 for n in range(len(settings["rank_pattern"]))
    }
    assert set(settings["alpha_pattern"].values()) == {7}
    assert settings["target_modules"] == ["gate_up_proj", "o_proj", "qkv_proj"]


def test_target_names_choose_nothing_else(open_model: Any) -> None:
    """The end of a name where it is enough, more of it where other matrices end the same."""
    with open_model("gpt2") as checkpoint:
        modules = modules_of(checkpoint)
        of_attention = [module for name, module in modules.items() if ".attn." in name]
        assert target_names(of_attention, checkpoint) == ["attn.c_proj", "c_attn"]
        assert target_names([modules["transformer.h.1.mlp.c_fc"]], checkpoint) == ["1.mlp.c_fc"]


def test_names_without_the_models_prefix_are_read(open_model: Any, adapter_folder: Path, golden: Path) -> None:
    """An adapter trained on the model without its head, and a folder whose tensors are called so."""
    tensors = {
        key.replace("model.model.model.", "model.model."): one for key, one in tensors_of(adapter_folder).items()
    }
    write_safetensors(adapter_folder / "adapter_model.safetensors", tensors)
    configure(adapter_folder, target_modules=ALL)
    with open_model("llama_plain") as checkpoint:
        bare, full = (read_adapter(f, checkpoint) for f in (adapter_folder, golden / "adapters" / "llama_plain"))
    assert all(np.array_equal(bare.deltas[name].b, delta.b) for name, delta in full.deltas.items())
    with open_model("gpt2_hub_layout") as checkpoint:
        assert "transformer.h.0.attn.c_attn" in modules_of(checkpoint)


def test_experts_have_adapters_and_routers_none(open_model: Any) -> None:
    """Where the files hold each expert by itself."""
    with open_model("mixtral") as checkpoint:
        names = modules_of(checkpoint)
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in names
    assert not any("gate" in name or "embed" in name or "head" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"not_yet_invented": 0.5}, "not_yet_invented is 0.5"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'.*changes the model's own weights"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern has the key .*names of modules alone"),
    ],
)
def test_other_arithmetic_is_refused_by_name(
    open_model: Any, adapter_folder: Path, settings: dict[str, Any], message: str
) -> None:
    """Never ignored."""
    configure(adapter_folder, **settings)
    with open_model("llama_plain") as checkpoint, pytest.raises(UnsupportedModelError, match=message):
        read_adapter(adapter_folder, checkpoint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r must be a whole number from 1 to 4096, but is 0"),
        ({"r": 10**9}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        (
            {"r": 5},
            r"lora_A.weight' must have shape \[5, \d+\] by adapter_config.json and the model, but has \[4, \d+\]",
        ),
        ({"lora_alpha": "8"}, "lora_alpha must be a number over 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number over 0"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"target_modules": [1]}, "target_modules must be names"),
        ({"target_modules": ["q_proj"]}, "is of a module that adapter_config.json does not choose"),
        ({"target_modules": ALL, "layers_to_transform": 0}, "is of a module that adapter_config.json does not choose"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be whole numbers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    open_model: Any, adapter_folder: Path, settings: dict[str, Any], message: str
) -> None:
    """Named, with what was expected."""
    configure(adapter_folder, **settings)
    with open_model("llama_plain") as checkpoint, pytest.raises(CheckpointError, match=message):
        read_adapter(adapter_folder, checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key: key.replace("lora_A", "lora_magnitude_vector"), "is no LoRA factor of a matrix"),
        (lambda key: key.replace("layers.0.self_attn.q_proj", "embed_tokens"), "only matrices of attention"),
        (lambda key: key.replace("model.layers.0.self_attn.q_proj", "lm_head"), "only matrices of attention"),
        (lambda key: key.replace("layers.0", "layers.77"), "the model in .* has no such matrix"),
        (lambda key: key.replace("0.mlp.up_proj.lora_B", "0.mlp.up.lora_B"), "has no such matrix"),
        (lambda key: "base_model.model.layers.0.mlp.up_proj.lora_B.weight" if "0.mlp.up_proj.lora_B" in key else key,
         "is there under two names"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_are_refused(
    open_model: Any, adapter_folder: Path, change: Callable[[str], str], message: str
) -> None:
    """Named as the file names them."""
    tensors = {change(key): one for key, one in tensors_of(adapter_folder).items()}
    write_safetensors(adapter_folder / "adapter_model.safetensors", tensors)
    configure(adapter_folder, target_modules="all-linear")
    with open_model("llama_plain") as checkpoint, pytest.raises(CheckpointError, match=message):
        read_adapter(adapter_folder, checkpoint)


def test_a_factor_without_the_other_is_refused(open_model: Any, adapter_folder: Path) -> None:
    """And one that is not finite, and a file without any."""
    path = adapter_folder / "adapter_model.safetensors"
    tensors, name = tensors_of(adapter_folder), "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    spoilt = tensors[name].copy()
    spoilt[1, 1] = np.nan
    without = {key: one for key, one in tensors.items() if key != name}
    for changed, message in (
        (without, "up_proj.lora_B.weight' is missing"),
        ({**tensors, name: spoilt}, "up_proj.lora_B.weight' has a NaN or an infinity"),
        ({}, "holds no tensors"),
    ):
        write_safetensors(path, changed)
        with open_model("llama_plain") as checkpoint, pytest.raises(CheckpointError, match=message):
            read_adapter(adapter_folder, checkpoint)


def test_pickles_and_other_folders_are_refused(open_model: Any, adapter_folder: Path, golden: Path) -> None:
    """A pickle is named and not opened."""
    (adapter_folder / "adapter_model.safetensors").rename(adapter_folder / "adapter_model.bin")
    with open_model("llama_plain") as checkpoint:
        with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle and is never opened"):
            read_adapter(adapter_folder, checkpoint)
        with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
            read_adapter(golden / "models" / "llama_plain", checkpoint)


def test_an_adapter_of_another_model_is_refused(open_model: Any, golden: Path) -> None:
    """By a name it lacks, or by a shape."""
    with open_model("gpt2") as checkpoint, pytest.raises(CheckpointError, match="has no such matrix"):
        read_adapter(golden / "adapters" / "llama_plain", checkpoint)
    with open_model("llama_tied_gqa") as checkpoint, pytest.raises(CheckpointError, match="lora_"):
        read_adapter(golden / "adapters" / "llama_plain", checkpoint)


def test_parts_of_a_fused_matrix_must_go_together(open_model: Any, golden: Path, tmp_path: Path) -> None:
    """PEFT has one A for all of them."""
    with open_model("phi3") as checkpoint:
        adapter = read_adapter(golden / "adapters" / "phi3", checkpoint)
        k = "layers.0.attention.k.weight"
        part = replace(adapter, deltas={name: one for name, one in adapter.deltas.items() if name != k})
        other_a = replace(adapter.deltas[k], a=adapter.deltas[k].a + 1)
        apart = replace(adapter, deltas={**adapter.deltas, k: other_a})
        for wrong, message in ((part, f"'{k}' is a part of a module"), (apart, "must share A and the scale")):
            with pytest.raises(CheckpointError, match=message):
                write_adapter(tmp_path, wrong, checkpoint)


def test_merging_keeps_each_weights_format(open_model: Any, golden: Path) -> None:
    """Sums of a bfloat16 model are rounded to bfloat16; what has no change is the same weight."""
    with open_model("llama_mqa_bf16") as checkpoint:
        name = "layers.0.mlp.up.weight"
        shape = checkpoint.params[name].shape
        change = LowRank(np.ones((1, shape[1]), np.float32), np.ones((shape[0], 1), np.float32), 0.5)
        merged = merge_adapter(checkpoint.params, Adapter("one", {name: change}))
        before, after = checkpoint.params[name], merged[name]
        assert after.view().dtype == before.view().dtype
        wide = np.empty(shape, np.float32)
        before.read_into(wide)
        assert np.array_equal(after.view(), (wide + 0.5).astype(before.view().dtype))
        assert merged["embedding.weight"] is checkpoint.params["embedding.weight"]
