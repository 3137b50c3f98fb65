"""Adapters change a request's weights and nobody else's; they come and go while requests run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from treadle_server import LanguageModel
from treadle_server.checkpoints.adapters import merge_adapter, read_adapter
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.checkpoints.saving import save_checkpoint
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.errors import AdapterNotFoundError, CheckpointError, InvalidRequestError

Load = Callable[..., LanguageModel]
PROMPT = [5, 90, 41, 7, 200, 5, 90, 41, 7, 200, 5, 90]
KNOBS = {"temperature": 0.9, "seed": 3, "max_tokens": 30, "ignore_eos": True, "logprobs": "raw"}
LONG = {**KNOBS, "max_tokens": 110}


@pytest.fixture(scope="session")
def first(golden: Path) -> Path:
    """An adapter of the tiny model."""
    return golden / "adapters" / "llama_plain"


@pytest.fixture(scope="session")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one: the same turned round."""
    folder = tmp_path_factory.mktemp("adapters") / "second"
    shutil.copytree(first, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    turned = {name: -t if "lora_B" in name else t for name, t in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", turned)
    return folder


@pytest.fixture
def model(load: Load, first: Path, second: Path) -> LanguageModel:
    """The tiny model in reproducible mode with the adapters `a` and `b`."""
    loaded = load()
    loaded.load_adapter("a", first)
    loaded.load_adapter("b", second)
    return loaded


def merged(source: Path, adapter: Path, folder: Path) -> Path:
    """Write a model with the adapter added to its weights."""
    shutil.copytree(source, folder)
    with load_checkpoint(source) as checkpoint:
        params = merge_adapter(checkpoint.params, read_adapter(adapter, checkpoint))
        save_checkpoint(folder, checkpoint, params)
    return folder


def test_an_adapter_does_what_merged_weights_do(
    load: Load, model: LanguageModel, tiny_folder: Path, first: Path, tmp_path: Path
) -> None:
    """W + scale * B @ A applied as it goes gives the logits, scores, traces and previews of the merged model."""
    whole = load(merged(tiny_folder, first, tmp_path / "merged"))
    expected = whole.logits(PROMPT)
    assert np.abs(model.logits(PROMPT) - expected).max() > 0.01
    np.testing.assert_allclose(model.logits(PROMPT, adapter="a"), expected, atol=1e-4)
    traced = model.trace(PROMPT, what="logits", adapter="a")["logits"]
    np.testing.assert_allclose(traced, expected, atol=1e-4)
    score = [entry.logprob for entry in model.score(PROMPT, adapter="a")[1:]]
    np.testing.assert_allclose(score, [entry.logprob for entry in whole.score(PROMPT)[1:]], atol=1e-4)
    preview = model.preview(PROMPT, adapter="a", seed=1).initial.probabilities
    np.testing.assert_allclose(preview, whole.preview(PROMPT, seed=1).initial.probabilities, atol=1e-5)


def test_the_answer_says_which_adapter_it_has(model: LanguageModel, first: Path) -> None:
    """PromptInfo names the adapter and its version; the bare model has none."""
    info = model.generate(PROMPT, **KNOBS, adapter="a").prompt_info
    assert (info.adapter, info.adapter_version) == ("a", 1)
    info = model.generate(PROMPT, **KNOBS).prompt_info
    assert (info.adapter, info.adapter_version) == ("", 0)
    assert [(entry.name, entry.version, entry.rank > 0) for entry in model.adapters] == [("a", 1, True), ("b", 1, True)]


def test_adapters_share_steps(model: LanguageModel, begin: Any, same: Any) -> None:
    """Requests of different adapters and of none run together, each as if it were alone."""
    names = ["a", "", "b", "a", ""]
    alone = {name: model.generate(PROMPT, **LONG, adapter=name) for name in set(names)}
    running = [begin(model, PROMPT, **LONG, adapter=name) for name in names]
    results = [one.finish() for one in running]
    assert all(same(result, alone[name]) for result, name in zip(results, names, strict=True))
    assert not same(alone["a"], alone[""])
    assert not same(alone["a"], alone["b"])


@pytest.mark.parametrize(
    "knobs",
    [
        {"n": 3},
        {"guidance_scale": 2.5, "negative_prompt": [9, 8, 7]},
        {"speculation": "prompt_lookup"},
        {"prompt_logprobs": True},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_every_kind_of_request_takes_an_adapter(
    load: Load, tiny_folder: Path, model: LanguageModel, first: Path, tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """Choices, guides, drafts and scored prompts all see the adapter: the tokens are the merged model's."""
    whole = load(merged(tiny_folder, first, tmp_path / "merged"))
    found = model.generate(PROMPT, **KNOBS, **knobs, adapter="a")
    expected = whole.generate(PROMPT, **KNOBS, **knobs)
    assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in expected.choices]


def test_preempted_requests_keep_their_adapter(load: Load, first: Path, begin: Any, same: Any) -> None:
    """A sequence whose cache was given back is computed again with its adapter."""
    model = load()
    model.load_adapter("a", first)
    expected = model.generate(PROMPT, **LONG, adapter="a")
    tight = load(engine_limits=EngineLimits(max_kv_bytes=model.kv_bytes_for(200)))
    tight.load_adapter("a", first)
    running = [begin(tight, PROMPT, **LONG, adapter="a") for _ in range(3)]
    assert all(same(one.finish(), expected) for one in running)


def test_a_replaced_adapter_stays_with_those_who_have_it(
    model: LanguageModel, second: Path, begin: Any, same: Any
) -> None:
    """Loading under a taken name gives later requests the new adapter with the next version."""
    old, new = (model.generate(PROMPT, **LONG, adapter=name) for name in ("a", "b"))
    running = begin(model, PROMPT, **LONG, adapter="a")
    assert model.load_adapter("a", second).version == 2
    after = model.generate(PROMPT, **LONG, adapter="a")
    assert same(after, new)
    assert after.prompt_info.adapter_version == 2
    assert same(running.finish(), old)


def test_an_unloaded_adapter_stays_with_those_who_have_it(
    model: LanguageModel, first: Path, begin: Any, same: Any
) -> None:
    """Later requests are refused with the names there are; a later adapter of the name has a version of its own."""
    expected = model.generate(PROMPT, **LONG, adapter="a")
    running = begin(model, PROMPT, **LONG, adapter="a")
    model.unload_adapter("a")
    with pytest.raises(InvalidRequestError, match=r"adapter: there is no adapter 'a'; loaded adapters: b"):
        model.generate(PROMPT, **KNOBS, adapter="a")
    with pytest.raises(InvalidRequestError, match="'a'"):
        model.score(PROMPT, adapter="a")
    with pytest.raises(AdapterNotFoundError, match="'a'"):
        model.unload_adapter("a")
    assert same(running.finish(), expected)
    assert model.load_adapter("a", first).version == 2


def test_adapters_outlive_an_update_of_the_weights(
    load: Load, model: LanguageModel, first: Path, second_folder: Path, same: Any
) -> None:
    """After an update the same adapters change the new weights."""
    model.update_weights(second_folder)
    expected = load(second_folder)
    expected.load_adapter("x", first)
    assert same(model.generate(PROMPT, **KNOBS, adapter="a"), expected.generate(PROMPT, **KNOBS, adapter="x"))


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "a" * 97, "a\n", 7])
def test_bad_names_are_refused(model: LanguageModel, first: Path, name: Any) -> None:
    """A name that nobody could type or log is refused by field."""
    with pytest.raises(InvalidRequestError, match="adapter: must be 1 to 96 letters"):
        model.load_adapter(name, first)


def test_a_broken_folder_leaves_what_is_loaded(model: LanguageModel, second: Path, tmp_path: Path, same: Any) -> None:
    """An adapter that cannot be read, or is of another model, replaces nothing."""
    before = model.generate(PROMPT, **KNOBS, adapter="a")
    torn = Path(shutil.copytree(second, tmp_path / "torn"))
    (torn / "adapter_model.safetensors").write_bytes((torn / "adapter_model.safetensors").read_bytes()[:-10])
    for folder in (torn, tmp_path / "absent", second.parent.parent):
        with pytest.raises(CheckpointError):
            model.load_adapter("a", folder)
    assert same(model.generate(PROMPT, **KNOBS, adapter="a"), before)
    assert model.adapters[0].version == 1
