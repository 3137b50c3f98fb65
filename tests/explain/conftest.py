"""The document's matrices: as treadle computes them, and as plain Python did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from treadle_server import LanguageModel
from treadle_server.explain.arithmetic import DocumentSteps, work_document


@pytest.fixture(scope="session")
def steps() -> DocumentSteps:
    """The document, worked by treadle's operations."""
    return work_document()


@pytest.fixture(scope="session")
def golden_matrices(golden: Path) -> dict[str, Any]:
    """The document, worked by plain Python floats."""
    return dict(json.loads((golden / "document" / "matrices.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def cat_mouse() -> Iterator[LanguageModel]:
    """The bundled model, which has the document's embedding and two heads."""
    with LanguageModel.load("cat-mouse", dtype="float64") as model:
        yield model
