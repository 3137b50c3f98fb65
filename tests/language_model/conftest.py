"""A tiny random model in both numerics modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from treadle_server import LanguageModel


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
