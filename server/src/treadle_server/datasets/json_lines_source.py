"""Documents in a JSONL file: an object a line, with a text or a conversation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle_server.datasets.documents import Document, record_document
from treadle_server.errors import DataError


class JsonLinesSource:
    """A JSONL file. Every line is checked when it is opened; raises DataError naming file and line.

    Only the places of the lines are kept in memory.
    """

    def __init__(self, path: Path, field: str = "text") -> None:
        self._path, self._field = path, field
        places: list[tuple[int, int]] = []
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._parse(line, number)
                    places.append((start, number))
                start += len(line)
        self._places = np.array(places, np.int64).reshape(-1, 2)  # start, line number

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Every document can be read alone."""
        return np.arange(len(self._places))

    def read(self, index: int) -> Document:
        """Return the document of one line."""
        start, number = self._places[index].tolist()
        with self._path.open("rb") as file:
            file.seek(start)
            return self._parse(file.readline(), number)

    def _parse(self, line: bytes, number: int) -> Document:
        origin = f"{self._path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}: is no UTF-8 at byte {error.start} of the line: {error.reason}") from error
        except ValueError as error:
            raise DataError(f"{origin}: is no JSON: {error}") from error
        except RecursionError as error:
            raise DataError(f"{origin}: is nested too deeply") from error
        return record_document(origin, record, self._field)
