"""Reads a GGUF file: metadata and mapped tensors, every length checked against the file before it is believed.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf`
package's own reader trusts the counts it finds, so that a damaged file can send it round for ever; its tables of types
and its dequantisers are used throughout.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from treadle_server.errors import CheckpointError, UnsupportedModelError

Value = TypeVar("Value", int, float, bool, str, list)  # type: ignore[type-arg]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor.

    Attributes:
        shape: outermost dimension first (GGUF writes it last), as `[out, in]` for a matrix.
        kind: how its numbers are stored.
        rows: uint8 [num_rows, row_bytes], mapped; a vector has one number a row, so that rows can be reordered alike.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata and tensors of one file, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """What the file says it is, such as `llama`; it also prefixes the architecture's keys."""
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type[Value]) -> Value:
        """Return the value of a key that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {key}")
        return value

    def get(self, key: str, kind: type[Value]) -> Value | None:
        """Return the value of a key, or None; raises CheckpointError when it is of another kind."""
        value = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        raise CheckpointError(f"{self.path}: {key} must be of type {kind.__name__}, is {value!r:.60}")


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file; raises CheckpointError naming the file when it is damaged or cut short."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    try:
        return _parse(path, _Cursor(data))
    except (_TruncatedError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged, cut short or of an unknown kind: {error}") from error


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the file's list of tensors says of one; `offset` counts bytes from the start of the data part."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _TruncatedError(Exception):
    """A length points past the end of the file."""


class _Cursor:
    """A place in the file; every step forward is checked against the file's end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.offset = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next bytes, uint8 [num_bytes], and step over them."""
        left = len(self.data) - self.offset
        if num_bytes > left:
            raise _TruncatedError(f"{num_bytes} bytes expected at offset {self.offset}, {left} are left")
        self.offset += num_bytes
        return self.data[self.offset - num_bytes : self.offset]

    def number(self, dtype: str) -> int:
        """Read one number of a NumPy dtype."""
        return int(self.numbers(dtype, 1)[0])

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        """Read `count` numbers of a NumPy dtype."""
        return self.take(count * np.dtype(dtype).itemsize).view(dtype)

    def string(self) -> str:
        """Read a string and the length before it."""
        return self.take(self.number("<u8")).tobytes().decode("utf-8")

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        """Read one metadata value as a plain Python one."""
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(_SCALARS[kind], 1).tolist()[0]
        if depth == _MAX_ARRAY_DEPTH:
            raise ValueError(f"arrays nested more than {_MAX_ARRAY_DEPTH} deep")
        return self._array(depth)

    def _array(self, depth: int) -> list[Any]:
        kind = GGUFValueType(self.number("<u4"))
        count = self.number("<u8")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count).tolist())
        # An item takes 8 bytes at least, so the file's end bounds this whatever `count` says.
        return [self.value(kind, depth + 1) for _ in range(count)]


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    num_tensors, num_keys = _read_header(path, cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.number("<u4")))
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    data = cursor.data[_data_start(cursor.offset, metadata) :]
    return GgufFile(path, metadata, {entry.name: _tensor(data, entry) for entry in entries})


def _read_header(path: Path, cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and metadata keys."""
    if (magic := cursor.take(4).tobytes()) != _MAGIC:
        raise CheckpointError(f"{path}: is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.number("<u4")
    if version not in _SUPPORTED_VERSIONS:
        # A big-endian file shows its version in the upper half.
        order = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise UnsupportedModelError(
            f"{path}: this GGUF file is {order}; little-endian ones of version 2 and 3 can be read"
        )
    return cursor.number("<u8"), cursor.number("<u8")


def _read_tensor_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    num_dimensions = cursor.number("<u4")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(int(size) for size in reversed(cursor.numbers("<u8", num_dimensions)))
    raw_kind, offset = cursor.number("<u4"), cursor.number("<u8")
    if raw_kind not in set(GGMLQuantizationType):
        raise ValueError(f"tensor {name!r} is of type {raw_kind}, which the installed gguf package does not know")
    return _Entry(name, shape, GGMLQuantizationType(raw_kind), offset)


def _data_start(offset: int, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"general.alignment must be a positive number, is {alignment!r}")
    return -(-offset // alignment) * alignment


def _tensor(data: np.ndarray, entry: _Entry) -> GgufTensor:
    name, shape, kind = entry.name, entry.shape, entry.kind
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_elements = math.prod(shape)
    if shape[-1] % block_size:
        raise ValueError(f"tensor {name!r}: rows of {shape[-1]} do not divide into {kind.name} blocks of {block_size}")
    end = entry.offset + num_elements // block_size * block_bytes
    if num_elements == 0 or end > len(data):
        raise ValueError(f"tensor {name!r} {list(shape)} needs {end} bytes of data, the file has {len(data)}")
    num_rows = num_elements if len(shape) == 1 and block_size == 1 else num_elements // shape[-1]
    return GgufTensor(name, shape, kind, data[entry.offset : end].reshape(num_rows, -1))
