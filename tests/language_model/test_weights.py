"""Weights are replaced between two steps; whoever began with the old ones ends with them."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.errors import CheckpointError, InvalidRequestError, VersionConflictError
from treadle_server.language_model import GenerationResult, gather
from treadle_server.plugins.manager import PluginManager

Load = Callable[..., LanguageModel]
PROMPT = [5, 90, 41, 7, 200, 5, 90, 41, 7, 200, 5, 90]
KNOBS = {"temperature": 0.9, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": "raw"}


def test_new_requests_get_the_new_weights(load: Load, same: Any, second_folder: Path) -> None:
    """After an update everything is as if the new folder had been loaded."""
    model, second = load(), load(second_folder)
    before = model.generate(PROMPT, **KNOBS)
    assert (model.update_weights(second_folder, label="later"), model.weight_version) == (2, 2)
    assert model.weight_label == "later"
    after = model.generate(PROMPT, **KNOBS)
    assert same(after, second.generate(PROMPT, **KNOBS))
    assert not same(after, before)
    assert (before.prompt_info.weight_version, after.prompt_info.weight_version) == (1, 2)
    assert after.choices[0].finish.weight_version == 2
    np.testing.assert_array_equal(model.logits(PROMPT), second.logits(PROMPT))
    assert model.score(PROMPT) == second.score(PROMPT)
    trace = model.trace(PROMPT, what="logits")
    assert trace.weight_version == 2
    np.testing.assert_array_equal(trace["logits"], second.trace(PROMPT, what="logits")["logits"])
    assert model.preview(PROMPT, seed=1).chosen == second.preview(PROMPT, seed=1).chosen


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"n": 3},
        {"guidance_scale": 2.5, "negative_prompt": [9, 8, 7]},
        {"speculation": "prompt_lookup"},
        {"speculation": "draft_model", "temperature": 0},
        {"prompt_logprobs": True, "num_top_logprobs": 3},
    ],
    ids=lambda knobs: next(iter(knobs), "plain"),
)
def test_requests_end_with_the_weights_they_began_with(
    load: Load, begin: Any, same: Any, tiny_folder: Path, second_folder: Path, knobs: dict[str, object]
) -> None:
    """A request under way gives what it would have given alone, beside one with the new weights in the same steps."""
    model = load(draft=tiny_folder)
    alone = model.generate(PROMPT, **{**KNOBS, **knobs})
    rest = begin(model, PROMPT, **{**KNOBS, "max_tokens": 110, **knobs})
    expected = load(draft=tiny_folder).generate(PROMPT, **{**KNOBS, "max_tokens": 110, **knobs})
    model.update_weights(second_folder)
    new = begin(model, PROMPT, **{**KNOBS, **knobs}).finish()
    old = rest.finish()
    assert same(old, expected)
    assert (old.prompt_info.weight_version, old.choices[0].finish.weight_version) == (1, 1)
    assert same(new, load(second_folder, draft=tiny_folder).generate(PROMPT, **{**KNOBS, **knobs}))
    assert new.prompt_info.weight_version == 2
    assert not same(new, alone)


def test_preempted_requests_start_over_with_their_own_weights(
    load: Load, begin: Any, same: Any, second_folder: Path
) -> None:
    """A sequence whose cache was given back is computed again with the weights it began with."""
    model = load(engine_limits=EngineLimits(max_kv_bytes=2 * 128 * 64 * 2 * 2 * 4))
    longer = {"max_tokens": 110}
    expected = load().generate(PROMPT, **KNOBS | longer)
    rests = [begin(model, PROMPT, **KNOBS | longer) for _ in range(3)]
    model.update_weights(second_folder)
    assert all(same(rest.finish(), expected) for rest in rests)


def test_requests_that_wait_keep_the_weights_of_their_arrival(
    load: Load, begin: Any, same: Any, second_folder: Path
) -> None:
    """The version is bound when a request is taken in, not when its turn comes."""
    model = load(engine_limits=EngineLimits(max_running=1))
    rest = begin(model, PROMPT, **{**KNOBS, "max_tokens": 100})
    waiting = model.stream(PROMPT, **KNOBS)
    first = next(waiting)
    model.update_weights(second_folder)
    assert first.weight_version == 1
    assert same(gather([first, *waiting]), load().generate(PROMPT, **KNOBS))
    rest.finish()


def test_old_weights_are_freed_when_their_last_request_ends(
    load: Load, begin: Any, second_folder: Path, slow_plugins: PluginManager
) -> None:
    """Two versions are in memory while requests of both run, and one afterwards, whoever still holds the results."""
    model = load(plugins=slow_plugins)
    old = weakref.ref(model.engine.weights)
    rest = begin(model, PROMPT, stages=[("slow", {})], **{**KNOBS, "max_tokens": 110})
    model.update_weights(second_folder)
    assert old() is not None
    assert model.engine.load().num_weight_versions == 2
    result = rest.finish()
    model.call(gc.collect).result()
    assert old() is None
    assert model.engine.load().num_weight_versions == 1
    assert result.prompt_info.weight_version == 1


def test_unexpected_version_is_refused(load: Load, second_folder: Path) -> None:
    """An update that expects another version changes nothing and names both."""
    model = load()
    with pytest.raises(VersionConflictError, match=r"version 1, not 7"):
        model.update_weights(second_folder, expected_version=7)
    assert model.weight_version == 1
    assert model.update_weights(second_folder, expected_version=1) == 2


def test_labels_are_short_texts(load: Load, second_folder: Path) -> None:
    """A label that no list could show is refused before anything is loaded."""
    model = load()
    for label in ("x" * 257, 7, "\ud800"):
        with pytest.raises(InvalidRequestError, match="label"):
            model.update_weights(second_folder, label=label)
    assert model.weight_version == 1


def test_wrong_checkpoints_leave_the_old_weights(
    load: Load, same: Any, tiny_folder: Path, golden: Path, tmp_path: Path
) -> None:
    """A broken folder, another architecture, another width or another vocabulary is refused by name."""
    model = load()
    before = model.generate(PROMPT, **KNOBS)
    narrow = shutil.copytree(tiny_folder, tmp_path / "narrow")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    torn = shutil.copytree(tiny_folder, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-100])
    words = shutil.copytree(tiny_folder, tmp_path / "words")
    text = (words / "tokenizer.json").read_text(encoding="utf-8")
    (words / "tokenizer.json").write_text(text.replace('"<s>"', '"<start>"'), encoding="utf-8")
    for folder, reason in [
        (narrow, "norm is"),
        (golden / "models" / "gpt2", "model_type is 'gpt2'"),
        (torn, "model.safetensors"),
        (words, "its token"),
        (tmp_path / "absent", "absent"),
    ]:
        with pytest.raises(CheckpointError, match=reason):
            model.update_weights(folder)
    assert model.weight_version == 1
    assert same(model.generate(PROMPT, **KNOBS), before)


def test_weights_alone_are_enough(load: Load, second_folder: Path, tmp_path: Path) -> None:
    """A checkpoint without a tokenizer updates the weights."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(second_folder / name, bare / name)
    assert load().update_weights(bare) == 2


def test_updates_wait_for_each_other(load: Load, begin: Any, tiny_folder: Path, second_folder: Path) -> None:
    """Updates at once get versions of their own, one after the other, while a stream goes on."""
    model = load()
    rest = begin(model, PROMPT, **{**KNOBS, "max_tokens": 110})
    versions: list[int] = []
    folders = [second_folder, tiny_folder, second_folder]
    threads = [threading.Thread(target=lambda f=f: versions.append(model.update_weights(f))) for f in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == [2, 3, 4]
    assert model.weight_version == 4
    assert rest.finish().prompt_info.weight_version == 1


def test_updates_under_load_mix_nothing_up(load: Load, tiny_folder: Path, second_folder: Path, same: Any) -> None:
    """While weights change again and again, each of many requests is what its version alone would have given."""
    model = load(engine_limits=EngineLimits(max_running=6, max_prefill_tokens=7, max_prefill_tokens_beside_decode=5))
    folders = {0: second_folder, 1: tiny_folder}  # by version modulo 2
    seeds = range(24)
    expected = {
        (version, seed): one.generate(PROMPT, **KNOBS | {"seed": seed})
        for version, one in ((v, load(folder)) for v, folder in folders.items())
        for seed in seeds
    }
    results: dict[int, GenerationResult] = {}

    def ask(seed: int) -> None:
        results[seed] = model.generate(PROMPT, **KNOBS | {"seed": seed})

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for number, thread in enumerate(threads):
        thread.start()
        if number % 4 == 3:
            model.update_weights(folders[(model.weight_version + 1) % 2])
    for thread in threads:
        thread.join()
    versions = {seed: result.prompt_info.weight_version for seed, result in results.items()}
    assert all(same(result, expected[versions[seed] % 2, seed]) for seed, result in results.items())
    assert len(set(versions.values())) > 3
    assert model.engine.load().kv_cache_bytes == 0


def test_loading_happens_beside_the_engine(load: Load, second_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint loads, requests are answered."""
    model = load()
    loading, go = threading.Event(), threading.Event()
    open_version = type(model._loader).open_version

    def slow(*args: object, **keywords: object) -> object:
        loading.set()
        assert go.wait(10)
        return open_version(*args, **keywords)

    monkeypatch.setattr(type(model._loader), "open_version", slow)
    thread = threading.Thread(target=model.update_weights, args=(second_folder,))
    thread.start()
    assert loading.wait(10)
    started = time.monotonic()
    assert model.generate(PROMPT, max_tokens=2).prompt_info.weight_version == 1
    assert time.monotonic() - started < 5
    go.set()
    thread.join()
    assert model.generate(PROMPT, max_tokens=2).prompt_info.weight_version == 2
