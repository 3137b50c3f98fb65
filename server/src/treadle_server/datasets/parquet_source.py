"""Documents in a Parquet file: a row each, with a text or a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_server.datasets.documents import MESSAGES_FIELD, Document, record_document
from treadle_server.errors import DataError


class ParquetSource:
    """A Parquet file. Its columns are checked when it is opened; raises DataError naming file and row.

    A row group is read whole and kept until another one is needed, so its documents form a block.
    """

    def __init__(self, path: Path, field: str = "text") -> None:
        parquet = _pyarrow_parquet()
        self._path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            raise DataError(f"{path}: is no Parquet file that can be read: {error}") from error
        names = self._file.schema_arrow.names
        self._column = next((name for name in (field, MESSAGES_FIELD) if name in names), "")
        if not self._column:
            raise DataError(f"{path}: must have a column {field!r} or {MESSAGES_FIELD!r}, but has {', '.join(names)}")
        self._check_nulls()
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._first_rows = np.cumsum([0, *counts])
        self._blocks = np.repeat(np.arange(len(counts)), counts)
        self._loaded: tuple[int, Any] = (-1, None)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A block is a row group."""
        return self._blocks

    def read(self, index: int) -> Document:
        """Return the document of one row."""
        group = int(self._blocks[index])
        origin = f"{self._path}, row {index + 1}"
        try:
            if self._loaded[0] != group:
                self._loaded = group, self._file.read_row_group(group, columns=[self._column])[self._column]
            value = self._loaded[1][index - int(self._first_rows[group])].as_py()
        except (ValueError, OSError) as error:
            raise DataError(f"{origin}: cannot be read: {error}") from error
        return record_document(origin, {self._column: value}, self._column)

    def _check_nulls(self) -> None:
        row = 1
        try:
            for batch in self._file.iter_batches(columns=[self._column]):
                column = batch.column(0)
                if column.null_count:
                    row += column.is_null().to_pylist().index(True)
                    raise DataError(f"{self._path}, row {row}: {self._column!r} must be given, but is null")
                row += len(column)
        except (ValueError, OSError) as error:
            raise DataError(f"{self._path}, from row {row}: cannot be read: {error}") from error


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Parquet files need pyarrow: pip install 'treadle-server[parquet]'") from error
    return pyarrow.parquet
