"""A tiny random model in both numerics modes, a second checkpoint of it, and generations under way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from treadle_server import LanguageModel
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.language_model import GenerationResult, gather
from treadle_server.plugins.manager import PluginManager

SLOW_PLUGIN = """
import time

from treadle_plugin_api import Stage, hookimpl


class Slow(Stage):
    name = "slow"
    kind = "transform"

    def apply(self, logits, context, state=None):
        time.sleep(0.01)
        return logits


@hookimpl
def treadle_register_stages(register):
    register(Slow)
"""


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The tiny model, fast numerics."""
    with LanguageModel.load(tiny_folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def exact_model(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The tiny model, reproducible numerics."""
    with LanguageModel.load(tiny_folder, numerics="reproducible") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def second_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second checkpoint of the tiny model: the same with noise on every tensor."""
    folder = tmp_path_factory.mktemp("weights") / "second"
    shutil.copytree(tiny_folder, folder)
    rng = np.random.default_rng(1)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: (t + rng.normal(0, 0.1, t.shape)).astype(t.dtype) for name, t in tensors.items()}
    write_safetensors(folder / "model.safetensors", changed)
    return folder


@pytest.fixture
def load(tiny_folder: Path) -> Iterator[Callable[..., LanguageModel]]:
    """Load models in reproducible mode, the tiny one unless told; they are closed at the end."""
    loaded = []

    def load_one(folder: Path = tiny_folder, **keywords: object) -> LanguageModel:
        loaded.append(LanguageModel.load(folder, numerics="reproducible", **keywords))
        return loaded[-1]

    yield load_one
    for model in loaded:
        model.close()


@pytest.fixture
def slow_plugins(tmp_path: Path) -> PluginManager:
    """All plugins, and a stage `slow`, of which a token takes 10 ms: for what must not end before something else."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "slow.py").write_text(SLOW_PLUGIN)
    return PluginManager.load([tmp_path / "plugins"])


class Running:
    """A generation of which the first token is there."""

    def __init__(self, model: LanguageModel, prompt: list[int], **knobs: object) -> None:
        self._stream = model.stream(prompt, **knobs)
        self._first = [next(self._stream), next(self._stream)]

    def finish(self) -> GenerationResult:
        """Read the rest of it."""
        return gather([*self._first, *self._stream])


@pytest.fixture(scope="session")
def begin() -> type[Running]:
    """Start a generation and wait for its first token; `finish` reads the rest of it."""
    return Running


@pytest.fixture(scope="session")
def same() -> Callable[[GenerationResult, GenerationResult], bool]:
    """Tell whether two generations have the same tokens and log-probabilities."""

    def content(result: GenerationResult) -> list[object]:
        return [(choice.token_ids, choice.logprobs) for choice in result.choices]

    return lambda a, b: content(a) == content(b)
