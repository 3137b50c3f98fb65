"""The compute backend of a trainer, by its name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from treadle_plugin_api.backend_factory import BackendFactory, backend_problems
from treadle_server import Trainer
from treadle_server.errors import ConfigError
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.plugins import PluginManager
from treadle_server.training.backends import make_training_backend
from treadle_server.training.run import load_trainer
from treadle_server.training.train_config import TrainConfig


class Own(NumpyBackend):
    """NumPy's under another name."""

    name = "own"


def fail(*_: object) -> Any:
    """Find that the machine will not do."""
    raise OSError("no such unit")


OWN = BackendFactory("own", fail, make_training=Own)
BROKEN = BackendFactory("broken", fail, make_training=fail)
SERVING = BackendFactory("serving", fail)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", "float32", "own"),
        ("own", "float32", "own"),
        ("numpy", "float32", "numpy"),
        ("auto", "float64", "numpy"),
    ],
)
def test_a_backend_is_chosen_by_name(name: str, dtype: Any, expected: str) -> None:
    """`auto` takes a plugin's where it trains in the number type."""
    plugged = {"serving": SERVING, "own": OWN}
    assert make_training_backend(name, dtype, plugged).name == expected


def test_auto_falls_back_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """On what else there is; NumPy's at the end."""
    with caplog.at_level(logging.WARNING):
        assert make_training_backend("auto", "float32", {"broken": BROKEN}).name == "numpy"
    assert "'broken' cannot train here: OSError: no such unit" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("serving", "no compute backend 'serving' that trains in float32; available: auto, numpy, broken"),
        ("none", "no compute backend 'none' that trains"),
        ("broken", "'broken' cannot train here: OSError: no such unit"),
    ],
)
def test_a_backend_that_cannot_train_is_refused(name: str, message: str) -> None:
    """By name nothing takes its place."""
    with pytest.raises(ConfigError, match=message):
        make_training_backend(name, "float32", {"serving": SERVING, "broken": BROKEN})


def test_a_factory_that_trains_by_no_function_is_refused() -> None:
    """Before anything is registered."""
    wrong: Any = "fast"
    assert list(backend_problems([BackendFactory("own", fail, make_training=wrong)])) == [
        "backend 'own' trains by 'fast', which is no function"
    ]


def test_a_trainer_takes_a_plugins_backend(golden: Path, tmp_path: Path) -> None:
    """Through the hook, like a server's."""
    (tmp_path / "own.py").write_text(
        "from treadle_plugin_api import hookimpl\n"
        "from treadle_plugin_api.backend_factory import BackendFactory\n"
        "from treadle_server.model.numpy_backend import NumpyBackend\n"
        "class Own(NumpyBackend):\n"
        "    name = 'own'\n"
        "@hookimpl\n"
        "def treadle_register_backends(register):\n"
        "    register(BackendFactory('own', None.__class__, make_training=Own))\n"
    )
    plugins = PluginManager.load([tmp_path])
    trainer = Trainer.load(golden / "models" / "llama_plain", backend="own", plugins=plugins)
    trainer.forward_backward([[1, 2, 3]])
    assert trainer.optim_step(lr=0.01).step == 1


def test_a_run_names_its_backend(golden: Path) -> None:
    """Its settings have the name, and a wrong one ends it before anything is read."""
    assert load_trainer(str(golden / "models" / "llama_plain"), TrainConfig(backend="numpy"), None).step == 0
    with pytest.raises(ConfigError, match="no compute backend 'none'"):
        load_trainer(str(golden / "models" / "llama_plain"), TrainConfig(backend="none"), None)
