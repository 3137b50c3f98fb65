"""Matrices in the format they are multiplied in, mapped from their files where those have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Weight

# Formats that are multiplied with as a file has them, and the NumPy dtype that compiled code has for their numbers.
KEPT: Mapping[str, np.dtype[Any]] = MappingProxyType({"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)})


class StoredMatrix:
    """A matrix `[rows, in]` in pieces of rows, each where it was found; it stands where the model has an array.

    Attributes:
        pieces: arrays of one dtype, each `[rows, in]`, the numbers of a row close together.
        shape: of all pieces, one after the other.
        stored: the format, by the name of the dtype that carries it; of panels that of the weights.
        segments: `[pieces, 4] int64`; see `products.linear`.
    """

    def __init__(self, pieces: Sequence[Array]) -> None:
        self.pieces = tuple(pieces)
        self.shape = (sum(map(len, pieces)), pieces[0].shape[1])
        self.stored = pieces[0].dtype.name
        self.segments = segments_of(pieces, [len(piece) for piece in pieces])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return some rows, by number, widened; of a matrix in one piece."""
        return widened(self.pieces[0][ids])


def segments_of(pieces: Sequence[Array], num_rows: Sequence[int]) -> NDArray[np.int64]:
    """Return `StoredMatrix.segments` of pieces that have so many rows each."""
    starts = [0, *accumulate(num_rows)]
    rows = zip(starts, num_rows, pieces, strict=False)
    return np.array([[start, count, address_of(one), one.strides[0]] for start, count, one in rows], np.int64)


def read_matrix(weights: Sequence[Weight]) -> Any:
    """Return weights `[rows, in]` one after the other: as they are stored where kernels read that, else as float32.

    What the file holds in one run of rows is mapped from it; other layouts are copied.
    """
    formats = {weight.dtype for weight in weights}
    if len(formats) == 1 and formats <= KEPT.keys():
        return StoredMatrix([_carried(weight) for weight in weights])
    return StoredMatrix([_read(weight) for weight in weights])


def _read(weight: Weight) -> NDArray[np.float32]:
    matrix = np.empty(weight.shape, np.float32)
    weight.read_into(matrix)
    return matrix


def _carried(weight: Weight) -> Array:
    found = weight.view()
    if found.strides[1] != found.dtype.itemsize:
        found = np.ascontiguousarray(found)
    kept: Array = found.view(KEPT[weight.dtype])
    return kept


def widened(stored: Array) -> NDArray[np.float32]:
    """Return stored numbers as float32."""
    return np.asarray(stored.view(ml_dtypes.bfloat16) if stored.dtype == np.uint16 else stored, np.float32)


def address_of(array: Array) -> int:
    """Return where an array's first number lies."""
    return int(array.__array_interface__["data"][0])
