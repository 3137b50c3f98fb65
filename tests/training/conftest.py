"""Trainers of the reference models, and what PyTorch made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import Trainer

LoadTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def load_trainer(golden: Path) -> LoadTrainer:
    """Loads a new trainer of a reference model by name; keyword arguments are the trainer's."""
    return lambda name="train/llama", **options: Trainer.load(golden / name, **options)


@pytest.fixture(scope="session")
def reference(golden: Path) -> Callable[[str], dict[str, Any]]:
    """Reads what PyTorch made of a model in float64, by its name."""
    return lambda name: dict(np.load(golden / "train" / f"{name}.npz"))
