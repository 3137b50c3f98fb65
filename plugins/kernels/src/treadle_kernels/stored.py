"""Matrices in the format they are multiplied in, mapped from their files where those have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Weight

# Formats that are multiplied with as a file has them, and the NumPy dtype that compiled code has for their numbers.
KEPT: Mapping[str, np.dtype[Any]] = MappingProxyType({"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)})
# Numbers of a row of int8 that share a scale, as a power of two.
GROUP_SHIFT = 5
QUANTISED_ROWS = 4096  # at once: float32 of so many is the memory that quantising takes


class StoredMatrix:
    """A matrix `[rows, in]` in pieces of rows, each where it was found; it stands where the model has an array.

    Attributes:
        pieces: arrays of one dtype, each `[rows, in]`, the numbers of a row close together.
        scales: of int8, for each piece `[rows, groups] float32`; else empty.
        shape: of all pieces, one after the other.
        stored: the format, by the name of the dtype that carries it.
        segments: `[pieces, 6] int64`; see `products.linear`.
    """

    def __init__(self, pieces: Sequence[Array], scales: Sequence[NDArray[np.float32]] = ()) -> None:
        self.pieces, self.scales = tuple(pieces), tuple(scales)
        self.shape = (sum(map(len, pieces)), pieces[0].shape[1])
        self.stored = pieces[0].dtype.name
        self.segments: NDArray[np.int64] = np.array(list(self._find()), np.int64)

    def _find(self) -> Iterator[list[int]]:
        start = 0
        for number, piece in enumerate(self.pieces):
            scales = self.scales[number] if self.scales else None
            found = [0, 0] if scales is None else [address_of(scales), scales.strides[0]]
            yield [start, len(piece), address_of(piece), piece.strides[0], *found]
            start += len(piece)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return some rows, by number, widened; of a matrix in one piece."""
        rows = widened(self.pieces[0][ids])
        if self.scales:
            rows *= np.repeat(self.scales[0][ids], 1 << GROUP_SHIFT, axis=-1)[..., : self.shape[1]]
        return rows


def read_matrix(weights: Sequence[Weight]) -> Any:
    """Return weights `[rows, in]` one after the other: as they are stored where kernels read that, else as float32.

    What the file holds in one run of rows is mapped from it; other layouts are copied.
    """
    formats = {weight.dtype for weight in weights}
    if len(formats) == 1 and formats <= KEPT.keys():
        return StoredMatrix([_carried(weight) for weight in weights])
    return StoredMatrix([_read(weight) for weight in weights])


def quantise_matrix(weights: Sequence[Weight]) -> Any:
    """Return weights `[rows, in]` one after the other, rounded to int8 with a scale for each 32 numbers of a row."""
    numbers, scales = zip(*(quantised(_read(weight)) for weight in weights), strict=True)
    return StoredMatrix(numbers, scales)


def quantised(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return a matrix `[rows, in]` as numbers from -127 to 127, and scales `[rows, groups]` whose products they are."""
    rows, width = matrix.shape
    groups = -(-width >> GROUP_SHIFT)
    numbers, scales = np.empty((rows, width), np.int8), np.empty((rows, groups), np.float32)
    padded = np.zeros((min(rows, QUANTISED_ROWS), groups << GROUP_SHIFT), np.float32)
    for start in range(0, rows, QUANTISED_ROWS):
        part = matrix[start : start + QUANTISED_ROWS]
        padded[: len(part), :width] = part
        grouped = padded[: len(part)].reshape(len(part), groups, -1)
        own = np.abs(grouped).max(axis=2) / np.float32(127)
        steps = np.divide(grouped, own[:, :, None], out=np.zeros_like(grouped), where=own[:, :, None] > 0)
        numbers[start : start + len(part)] = np.rint(steps).reshape(len(part), -1)[:, :width]
        scales[start : start + len(part)] = own
    return numbers, scales


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
