"""Arrays as they come from the server: NumPy's where NumPy is installed, which this package never asks for."""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

_CODES: Final = MappingProxyType({"float32": "f", "float64": "d", "int64": "q", "bool": "?"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An array without NumPy.

    Attributes:
        dtype: type of its numbers: `float32`, `float64`, `int64` or `bool`.
        shape: its dimensions, outermost first.
        data: the numbers, little-endian, the last dimension running fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def tolist(self) -> Any:
        """Return the numbers in nested lists; a single number where there are no dimensions."""
        values: Any = list(struct.unpack(f"<{math.prod(self.shape)}{_CODES[self.dtype]}", self.data))
        for size in reversed(self.shape[1:]):
            values = [values[i : i + size] for i in range(0, len(values), size)] if size else []
        return values if self.shape else values[0]


def make_array(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    """Return a read-only NumPy array, or a Tensor without NumPy."""
    numpy = _numpy()
    if numpy is None:
        return Tensor(dtype=dtype, shape=shape, data=data)
    return numpy.frombuffer(data, numpy.dtype(dtype).newbyteorder("<")).reshape(shape)


def make_vector(dtype: str, values: Sequence[float]) -> Any:
    """Return a read-only NumPy array [n], or a tuple without NumPy."""
    numpy = _numpy()
    if numpy is None:
        return tuple(values)
    array = numpy.array(values, dtype)
    array.flags.writeable = False
    return array


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None
