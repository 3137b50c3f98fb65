"""Quantised matrices, laid out once as their kernels read them; see `quantised_tiles` for the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import GROUP_SIZE, QUANTISED_BITS, QuantisedWeight, Weight

from treadle_kernels.quantised_tiles import OFFSETS, PANEL_ROWS, bytes_of_group
from treadle_kernels.stored import StoredMatrix, read_matrix, segments_of

_SCALES_BYTES = 2 * PANEL_ROWS
_BLOCK_BYTES, _LINE = 64 << 20, 64
_PACKED_ROWS = 4096  # rows laid out at once: what that takes beside the panels themselves


Take = Callable[..., NDArray[np.uint8]]  # called with a shape and uint8


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A matrix `[rows, columns]`; data: `[panels, groups, bytes of a group] uint8`."""

    data: NDArray[np.uint8]
    num_rows: int
    num_columns: int
    dtype: str

    @classmethod
    def of(cls, weight: QuantisedWeight, take: Take = np.empty) -> Panels:
        """Lay out a quantised matrix in memory that `take` gives."""
        num_rows, num_columns = weight.shape
        num_panels, num_groups = -(-num_rows // PANEL_ROWS), -(-num_columns // GROUP_SIZE)
        data = take((num_panels, num_groups, bytes_of_group(QUANTISED_BITS[weight.dtype])), np.uint8)
        for start in range(0, num_rows, _PACKED_ROWS):
            stop = min(start + _PACKED_ROWS, num_rows)
            part = data[start // PANEL_ROWS : -(-stop // PANEL_ROWS)]
            _fill(part, weight.integers(slice(start, stop)), weight.scales[start:stop], weight.dtype)
        return cls(data, num_rows, num_columns, weight.dtype)

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return some rows by number, `[*ids, columns]`, with their scales."""
        panels, lanes = self.data[ids // PANEL_ROWS], ids % PANEL_ROWS
        own = lanes[..., None, None]
        scales = panels[..., :_SCALES_BYTES].view(ml_dtypes.bfloat16)
        scales = np.take_along_axis(scales, own, axis=-1)
        lines = panels[..., _SCALES_BYTES:].reshape(*panels.shape[:-1], -1, PANEL_ROWS, 4)
        found = np.take_along_axis(lines, own[..., None, None], axis=-2)[..., 0, :]
        if self.dtype == "int4":
            found = np.stack([found & 15, found >> 4], axis=-2)
        offset = np.float32(OFFSETS[QUANTISED_BITS[self.dtype]])
        numbers = found.reshape(*panels.shape[:-1], GROUP_SIZE).astype(np.float32) - offset
        values: NDArray[np.float32] = numbers * scales.astype(np.float32)
        return values.reshape(*ids.shape, -1)[..., : self.num_columns]


def _fill(data: NDArray[np.uint8], numbers: NDArray[np.int8], scales: NDArray[np.generic], dtype: str) -> None:
    """Fill panels `[panels, groups, bytes]` with numbers `[rows, columns]` and their scales `[rows, groups]`."""
    num_panels, num_groups, _ = data.shape
    padded = np.zeros((num_panels * PANEL_ROWS, num_groups * GROUP_SIZE), np.int8)
    padded[: len(numbers), : numbers.shape[1]] = numbers
    unsigned = padded.view(np.uint8) + np.uint8(OFFSETS[QUANTISED_BITS[dtype]])  # modulo 256
    steps = unsigned.reshape(num_panels, PANEL_ROWS, num_groups, -1, 4)
    if dtype == "int4":
        steps = np.bitwise_or(steps[:, :, :, ::2], np.left_shift(steps[:, :, :, 1::2], 4))
    data[:, :, _SCALES_BYTES:] = steps.transpose(0, 2, 3, 1, 4).reshape(num_panels, num_groups, -1)
    own = np.zeros((num_panels * PANEL_ROWS, num_groups), ml_dtypes.bfloat16)
    own[: len(scales)] = scales
    turned = own.reshape(num_panels, PANEL_ROWS, num_groups).transpose(0, 2, 1)
    data[:, :, :_SCALES_BYTES] = np.ascontiguousarray(turned).view(np.uint8)


class PanelMatrix(StoredMatrix):
    """A matrix in pieces of rows, each in panels; it stands where the model has an array."""

    def __init__(self, panels: Sequence[Panels]) -> None:
        counts = [one.num_rows for one in panels]
        self.pieces = tuple(one.data for one in panels)
        self.shape = (sum(counts), panels[0].num_columns)
        self.stored = panels[0].dtype
        self.segments = segments_of(self.pieces, counts)
        self._panels = tuple(panels)

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return some rows, by number, widened; of a matrix in one piece."""
        return self._panels[0].rows(ids)


class Layout:
    """Lays the matrices of one model out, side by side in large blocks of memory.

    For a block of this size NumPy asks the system for huge pages. Arrays of their own, most of them under 4 MB, lie in
    pages of 4 KB each, and a step for one stream takes a quarter longer.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def read(self, weights: Sequence[Weight]) -> Any:
        """Return weights `[rows, in]` one after the other: in panels where all are quantised alike, else as stored."""
        if {weight.dtype for weight in weights} in ({"int8"}, {"int4"}):
            own = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
            return PanelMatrix([Panels.of(weight, self._take) for weight in own])
        return read_matrix(weights)

    def _take(self, shape: tuple[int, ...], dtype: type[np.uint8]) -> NDArray[np.uint8]:
        num_bytes = math.prod(shape)
        if num_bytes > len(self._rest):
            self._rest = np.empty(max(num_bytes, _BLOCK_BYTES), dtype)
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // _LINE) * _LINE :]
        return taken.reshape(shape)
