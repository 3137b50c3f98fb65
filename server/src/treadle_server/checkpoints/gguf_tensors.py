"""Turns the tensors of a GGUF file into safetensors ones, a few rows at a time.

Float numbers stay exact: F16 and BF16 keep their type, F32 becomes BF16 only where nothing is lost. Quantised ones are
widened by the `gguf` package to float32 and rounded to BF16, nearest even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from treadle_server.checkpoints.gguf_file import GgufTensor
from treadle_server.checkpoints.safetensors_stream import DType, TensorSource
from treadle_server.errors import CheckpointError, UnsupportedModelError

_FLOATS: dict[GGMLQuantizationType, tuple[DType, np.dtype[np.generic]]] = {
    GGMLQuantizationType.F32: ("F32", np.dtype(np.float32)),
    GGMLQuantizationType.F16: ("F16", np.dtype(np.float16)),
    GGMLQuantizationType.BF16: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
_NUMBERS_PER_PIECE = 1 << 21  # 8 MB as float32: large enough for NumPy to be quick, small beside any model


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """A tensor, or some rows of one, under its Hugging Face name.

    Attributes:
        shape: of the result.
        rows: int64 [num_rows], row i of the result is row `rows[i]` of the file's; None takes all in order.
        offset: what the file has added to every number, and is taken off again.
        transposed: whether the file's rows are the result's columns.
    """

    name: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    offset: float = 0.0
    transposed: bool = False


def to_source(mapped: MappedTensor, path: Path) -> TensorSource:
    """Describe how a tensor is to be written; raises UnsupportedModelError when `gguf` cannot dequantise its type."""
    if mapped.tensor.kind not in _FLOATS:
        _check_dequantizable(mapped.tensor, path)
    dtype = _target_dtype(mapped)
    return TensorSource(mapped.name, dtype, mapped.shape, lambda: _pieces(mapped, dtype, path))


def to_float32(tensor: GgufTensor) -> np.ndarray:
    """Return a small tensor whole, as float32 of its own shape."""
    return _widen(tensor.rows, tensor.kind).astype(np.float32).reshape(tensor.shape)


def _check_dequantizable(tensor: GgufTensor, path: Path) -> None:
    try:
        _widen(tensor.rows[:1], tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name!r} is stored as {tensor.kind.name}, which cannot be dequantised; "
            "supported are F32, F16, BF16 and the Q and IQ types of the gguf package"
        ) from error


def _target_dtype(mapped: MappedTensor) -> DType:
    kind = mapped.tensor.kind
    if kind in _FLOATS and kind is not GGMLQuantizationType.F32:
        return "F32" if mapped.offset else _FLOATS[kind][0]
    if kind is GGMLQuantizationType.F32 and any(_loses(rows, mapped.offset) for rows in _row_blocks(mapped)):
        return "F32"
    return "BF16"


def _loses(rows: np.ndarray, offset: float) -> bool:
    """True when some float32 of the file, uint8 [num_rows, row_bytes], cannot be had back from BF16."""
    if not offset:  # BF16 keeps the upper 16 bits
        return bool(np.any(np.ascontiguousarray(rows).view(np.uint32) & 0xFFFF))
    stored = np.ascontiguousarray(rows).view(np.float32)
    rounded = _without(stored, offset).astype(ml_dtypes.bfloat16).astype(np.float32)
    return not np.array_equal(_without(rounded, -offset), stored)


def _without(numbers: np.ndarray, offset: float) -> np.ndarray:
    """float32, less the offset; NaN is found and named later."""
    with np.errstate(all="ignore"):
        return np.asarray(numbers.astype(np.float32) - np.float32(offset))


def _pieces(mapped: MappedTensor, dtype: DType, path: Path) -> Iterator[np.ndarray]:
    target = next(numpy_dtype for name, numpy_dtype in _FLOATS.values() if name == dtype)
    widened = _widened(mapped)
    # The columns of the file's rows come last to the first, so a transposed matrix is whole in memory for a moment.
    for piece in [np.concatenate(list(widened)).T] if mapped.transposed else widened:
        numbers = piece.astype(target, copy=False)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{path}: tensor {mapped.tensor.name!r} holds NaN or infinite numbers")
        yield numbers


def _widened(mapped: MappedTensor) -> Iterator[np.ndarray]:
    for rows in _row_blocks(mapped):
        numbers = _widen(rows, mapped.tensor.kind)
        yield _without(numbers, mapped.offset) if mapped.offset else numbers


def _row_blocks(mapped: MappedTensor) -> Iterator[np.ndarray]:
    """Yield the rows that are wanted, uint8 [some, row_bytes] each."""
    stored = mapped.tensor.rows
    order = np.arange(len(stored)) if mapped.rows is None else mapped.rows
    step = max(1, _NUMBERS_PER_PIECE // max(1, mapped.tensor.shape[-1] if len(mapped.tensor.shape) > 1 else 1))
    for start in range(0, len(order), step):
        some = order[start : start + step]
        in_order = mapped.rows is None or bool(np.all(np.diff(some) == 1))
        yield stored[some[0] : some[-1] + 1] if in_order else stored[some]


def _widen(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [num_rows, row_bytes] -> [num_rows, row_length]: float types as they are, quantised ones as float32."""
    if kind in _FLOATS:
        return np.ascontiguousarray(rows).view(_FLOATS[kind][1])
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which is found and named later
        widened: np.ndarray = dequantize(rows, kind)
    return widened
