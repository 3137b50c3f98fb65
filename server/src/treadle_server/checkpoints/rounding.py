"""Rounding matrices to eight or four bits, with a scale for each 32 numbers of a row.

The scale of int8 is that of the largest number. Four bits have sixteen steps, and the largest number is rarely the one
that they should fit: of some scales, among them those that cut it off, the one with the least squared error is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import GROUP_SIZE, QuantisedWeight, Weight

Floats = NDArray[np.float32]

LARGEST = 127
# What the largest number of a group of four bits is rounded to, at first: from -8 to 7 there are, and one below -8 is
# cut off. Its sign becomes the scale's, so that there is one more step for it.
_TARGETS = (-8.0, -7.6, -7.2, -6.9, -8.4, -8.8, -9.4, -10.0, 7.0)
_BLOCK = 1 << 19  # numbers treated at once: they and what is made of them stay in the cache


def round_weight(weight: Weight, dtype: str) -> QuantisedWeight:
    """Return a matrix rounded to `int8` or `int4`; raises ValueError where it is not finite."""
    num_rows, num_columns = weight.shape
    matrix = np.empty(weight.shape, np.float32)
    weight.read_into(matrix)
    num_groups = -(-num_columns // GROUP_SIZE)
    numbers = np.empty((num_rows, num_columns), np.int8)
    scales = np.empty((num_rows, num_groups), ml_dtypes.bfloat16)
    for rows, groups in _in_groups(matrix, num_groups):
        found, own = _round_eight(groups) if dtype == "int8" else _round_four(groups)
        if not np.isfinite(own).all():
            raise ValueError("it has numbers that are not finite")
        numbers[rows] = found.reshape(-1, num_groups * GROUP_SIZE)[:, :num_columns]
        scales[rows] = own
    return QuantisedWeight(numbers if dtype == "int8" else pack_halves(numbers), scales, num_columns)


def pack_halves(numbers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return numbers from -8 to 7 `[rows, n]`, plus 8, two a byte: `[rows, (n + 1) // 2]`."""
    halves = np.zeros((len(numbers), numbers.shape[1] + numbers.shape[1] % 2), np.uint8)
    halves[:, : numbers.shape[1]] = numbers + np.int8(8)
    packed: NDArray[np.uint8] = halves[:, ::2] | halves[:, 1::2] << 4
    return packed


def _in_groups(matrix: Floats, num_groups: int) -> Iterator[tuple[slice, Floats]]:
    """Yield some rows at a time, `[rows, groups, GROUP_SIZE]`, filled up with zeros."""
    width = num_groups * GROUP_SIZE
    step = max(1, _BLOCK // width)
    for start in range(0, len(matrix), step):
        part = matrix[start : start + step]
        if part.shape[1] < width:
            part = np.pad(part, ((0, 0), (0, width - part.shape[1])))
        yield slice(start, start + step), part.reshape(len(part), num_groups, GROUP_SIZE)


def _round_eight(groups: Floats) -> tuple[Floats, Floats]:
    scales = _short(np.abs(groups).max(axis=2) / np.float32(LARGEST))
    return np.clip(_steps(groups, scales), -LARGEST, LARGEST), scales


def _round_four(groups: Floats) -> tuple[Floats, Floats]:
    """Return numbers and scales whose products are the nearest that were found."""
    places = np.abs(groups).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(groups, places, axis=2)[:, :, 0]
    numbers, scales = np.zeros_like(groups), np.zeros_like(largest)
    least = np.full_like(largest, np.inf)
    for target in _TARGETS:
        tried = _short(largest / np.float32(target))
        found = np.clip(_steps(groups, tried), -8, 7)
        errors = ((found * tried[:, :, None] - groups) ** 2).sum(axis=2)
        better = errors < least
        numbers[better], scales[better], least[better] = found[better], tried[better], errors[better]
    scales[~np.isfinite(largest)] = np.nan
    return numbers, scales


def _steps(groups: Floats, scales: Floats) -> Floats:
    """Return what each number is in steps of its group's scale, rounded; 0 where that is 0."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    return np.rint(groups * inverse[:, :, None])


def _short(scales: Floats) -> Floats:
    """Round to bfloat16."""
    return scales.astype(ml_dtypes.bfloat16).astype(np.float32)
