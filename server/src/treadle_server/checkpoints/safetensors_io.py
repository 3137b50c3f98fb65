"""Reading and writing safetensors files.

The reader is our own: it checks the whole header before any tensor is touched, reads a tensor straight into the buffer
that it is used from, and widens float16 and bfloat16 on the way (the safetensors library cannot read bfloat16 into
NumPy). The writer hands C-contiguous arrays to the library (version 0.8.0 silently scrambles others) and reads the
file back.

Format: 8 bytes little-endian header length, that much JSON `{name: {dtype, shape, data_offsets}}`, the numbers.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array

from treadle_server.errors import CheckpointError, UnsupportedModelError

# The format's own limit; a longer header is an attack or a damaged length.
MAX_HEADER_BYTES = 100_000_000
# Axes of a tensor; a product of more sizes would be a number that nobody can print.
_MAX_RANK = 8
# Numbers read at once when they have to be converted: the only memory a read takes beside its destination.
CHUNK_BYTES = 1 << 22
DTYPES: Mapping[str, np.dtype[np.generic]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }
)
_BYTES_PER_ITEM: Mapping[str, int] = MappingProxyType({
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file; `offset` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def _map_file(file: BinaryIO) -> mmap.mmap:
    """Map a file to read; in huge pages where the system has them and does not hold the file in small ones already.

    A step of decoding reads all of a model: in pages of 4 KB looking those up takes up to a third of its time.
    """
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class SafetensorsFile:
    """An open safetensors file. Reads may come from any thread; a file replaced by rename stays readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        try:
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_read_header(self._file, path))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; views that were mapped from it stay valid."""
        self._file.close()

    def read_columns_into(self, name: str, columns: slice, out: Array) -> None:
        """Fill `out` with `tensor[:, columns].T`: rows of a matrix that the file stores transposed."""
        shape = self.tensors[name].shape
        for start, chunk in self._chunks(name, 0, shape[0], shape[1:]):
            _widen(chunk[:, columns].T, out[:, start : start + len(chunk)])

    def read_rows_into(self, name: str, start: int, out: Array) -> None:
        """Fill `out` (float32 or float64, no narrower than the tensor, any strides) with the rows from `start` on.

        A row is what `out` has in a row, so leading axes of the tensor may count as rows too.
        """
        if out.flags.c_contiguous and out.dtype == self.dtype(name):
            self._read_bytes(name, start * (out.nbytes // max(1, len(out))), out)
            return
        for row, chunk in self._chunks(name, start, start + len(out), out.shape[1:]):
            _widen(chunk, out[row - start : row - start + len(chunk)])

    def map(self, name: str) -> Array:
        """Return the tensor memory-mapped, read-only, in the file's own dtype.

        A file replaced by rename stays readable; one truncated in place kills the process that reads it.
        """
        return self.map_bytes(name).view(self.dtype(name)).reshape(self.tensors[name].shape)

    def map_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor of any format, memory-mapped, read-only."""
        info = self.tensors[name]
        with self._lock:
            if self._map is None:
                self._map = _map_file(self._file)
        return np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the NumPy dtype of a tensor. Raises UnsupportedModelError for a format that is not a plain float."""
        stored = self.tensors[name].dtype
        if stored not in DTYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is stored as {stored}; treadle reads {', '.join(DTYPES)}. "
                "Use an unquantised version of the model."
            )
        return DTYPES[stored]

    def _chunks(self, name: str, start: int, stop: int, row_shape: tuple[int, ...]) -> Iterator[tuple[int, Array]]:
        """Yield (first row, rows) of the tensor in pieces of about CHUNK_BYTES; a piece is valid until the next."""
        dtype = self.dtype(name)
        row_bytes = math.prod(row_shape) * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        buffer = np.empty((min(step, stop - start), *row_shape), dtype)
        for row in range(start, stop, step):
            chunk = buffer[: min(step, stop - row)]
            self._read_bytes(name, row * row_bytes, chunk)
            yield row, chunk

    def _read_bytes(self, name: str, skip: int, out: Array) -> None:
        """Fill the C-contiguous `out` with the file's bytes, `skip` bytes into the tensor."""
        target = out.reshape(-1).view(np.uint8).data
        with self._lock:
            self._file.seek(self.tensors[name].offset + skip)
            while target:
                count = self._file.readinto(target)  # type: ignore[attr-defined]  # an unbuffered file is a RawIOBase
                if not count:
                    raise CheckpointError(f"{self.path}: the file ends inside tensor {name!r}")
                target = target[count:]


def _widen(chunk: Array, out: Array) -> None:
    """Copy numbers of any float dtype to a wider one; bfloat16 is the upper half of float32."""
    if chunk.dtype == DTYPES["BF16"] and out.dtype == np.float32:
        np.left_shift(chunk.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = chunk


def _read_header(file: BinaryIO, path: Path) -> dict[str, TensorInfo]:
    """Return every tensor's place, or raise CheckpointError unless header and data fit each other exactly."""
    file_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(f"{path}: not a safetensors file, or cut short: {file_bytes} bytes, header {length}")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header must be a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + length, file_bytes)
    return tensors


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name appears twice")
    return entries


def _read_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    """Return one tensor's place after checking dtype, shape and size against each other."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name!r} must have dtype, shape, data_offsets, but has {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (_are_counts(shape, _MAX_RANK) and _are_counts(offsets, 2) and len(offsets) == 2):
        raise CheckpointError(
            f"{path}: tensor {name!r} has malformed shape or offsets: {shape!r:.100} {offsets!r:.100}"
        )
    if not isinstance(dtype, str):
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed dtype: {dtype!r:.100}")
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _BYTES_PER_ITEM.get(dtype, 0)
    if num_bytes < 0 or (dtype in _BYTES_PER_ITEM and num_bytes != expected):
        raise CheckpointError(f"{path}: tensor {name!r} of {dtype} {shape} needs {expected} bytes, but has {num_bytes}")
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_counts(values: object, max_length: int) -> bool:
    """Tell whether a value is a list of so many whole numbers at most, each of them in the range of a file's size."""
    if not isinstance(values, list) or len(values) > max_length:
        return False
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_cover(path: Path, tensors: Mapping[str, TensorInfo], start: int, file_bytes: int) -> None:
    """Raise CheckpointError unless the tensors lie end to end from `start` to the end of the file."""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset != start:
            kind = "overlaps the one before it" if info.offset < start else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} {kind}")
        start += info.num_bytes
        if start > file_bytes:
            raise CheckpointError(f"{path}: cut short inside tensor {name!r}: {file_bytes} bytes, {start} needed")
    if start != file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - start} bytes follow the last tensor")


def write_safetensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write the tensors (bfloat16 by ml_dtypes allowed), flush them to disk, read them back to compare, then rename.

    Whoever has an older file of that name mapped keeps it. Raises CheckpointError when the file cannot be written or
    does not hold what was written.
    """
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    partial = path.with_name(path.name + ".partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # what the user's files have; the library gives its own to their owner alone
        safetensors.numpy.save_file(contiguous, partial, dict(metadata or {"format": "pt"}))
        partial.chmod(mode)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        _verify(partial, contiguous)
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _verify(path: Path, tensors: Mapping[str, Array]) -> None:
    file = SafetensorsFile(path)
    try:
        if file.tensors.keys() != tensors.keys():
            raise CheckpointError(f"{path}: read back other tensors than were written")
        for name, array in tensors.items():
            info = file.tensors[name]
            written = array.reshape(-1).view(np.uint8)
            if info.shape != array.shape or not np.array_equal(file.map_bytes(name), written):
                raise CheckpointError(f"{path}: tensor {name!r} reads back different from what was written")
    finally:
        file.close()
