"""A real server on loopback with a tiny model, a plugin that misbehaves, and a model whose numbers overflow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from treadle_client import Client
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

BAD_PLUGIN = '''
import time

import numpy as np
from treadle_plugin_api import Stage, hookimpl


class Faulty(Stage):
    """Does what no stage may."""

    name = "faulty"
    kind = "transform"

    how: str = "raise"

    def apply(self, logits, context, state=None):
        if self.how == "raise":
            raise RuntimeError("boom")
        if self.how == "sleep":
            time.sleep(0.02)
            return logits
        if self.how == "nan":
            return np.full_like(logits, np.nan)
        if self.how == "shape":
            return logits[:-1]
        if self.how == "mask_all":
            return np.full_like(logits, -np.inf)
        return "not an array"


@hookimpl
def treadle_register_stages(register):
    register(Faulty)
'''


@pytest.fixture(scope="session")
def overflowing_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with an output head of infinities."""
    from safetensors.numpy import load_file

    folder = tmp_path_factory.mktemp("models") / "overflowing"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], np.inf)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="session")
def plugin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one plugin that misbehaves and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "faulty.py").write_text(BAD_PLUGIN)
    (folder / "broken.py").write_text("raise ImportError('no such thing')\n")
    return folder


@pytest.fixture(scope="session")
def target(tiny_folder: Path, overflowing_folder: Path, plugin_dir: Path) -> Iterator[str]:
    """Address of a server with the models `tiny` and `overflowing`, in reproducible mode."""
    config = ServerConfig(port=0, numerics="reproducible", plugin_dirs=(plugin_dir,), grace_s=0)
    with embedded_server([f"tiny={tiny_folder}", f"overflowing={overflowing_folder}"], config) as address:
        yield address


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    """A client of that server."""
    with Client(target, timeout_s=30) as made:
        yield made
