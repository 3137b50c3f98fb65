"""Files of training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from treadle_server.datasets import Dataset
from treadle_server.datasets.documents import Document

WriteLines = Callable[[str, Sequence[Any]], Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Writes a JSONL file of the given objects."""

    def write(name: str, records: Sequence[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def documents() -> Callable[[Dataset], list[Document]]:
    """Reads all documents of a dataset."""
    return lambda dataset: [dataset.read(index) for index in range(len(dataset))]
