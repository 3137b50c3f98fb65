"""Turns the tensors of a GGUF file into safetensors ones, a few rows at a time.

Float numbers stay exact: F16 and BF16 keep their type, F32 becomes BF16 only where no bit is lost. Quantised ones are
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


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor under its Hugging Face name.

    Attributes:
        row_order: int64 [num_rows], row i of the result is row `row_order[i]` of the file; None keeps the order.
    """

    name: str
    tensor: GgufTensor
    row_order: np.ndarray | None = None


def to_source(mapped: MappedTensor, path: Path) -> TensorSource:
    """Describe how a tensor is to be written; raises UnsupportedModelError when `gguf` cannot dequantise its type."""
    tensor = mapped.tensor
    if tensor.kind not in _FLOATS:
        _check_dequantizable(tensor, path)
    dtype = _target_dtype(tensor)
    return TensorSource(mapped.name, dtype, tensor.shape, lambda: _pieces(mapped, dtype, path))


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


def _target_dtype(tensor: GgufTensor) -> DType:
    if tensor.kind in _FLOATS and tensor.kind is not GGMLQuantizationType.F32:
        return _FLOATS[tensor.kind][0]
    if tensor.kind is GGMLQuantizationType.F32 and any(_loses_bits(rows) for rows in _row_blocks(tensor, None)):
        return "F32"
    return "BF16"


def _loses_bits(rows: np.ndarray) -> bool:
    """True when some float32 has bits below the upper 16 that BF16 keeps."""
    return bool(np.any(rows.view(np.uint32) & 0xFFFF))


def _pieces(mapped: MappedTensor, dtype: DType, path: Path) -> Iterator[np.ndarray]:
    target = next(numpy_dtype for name, numpy_dtype in _FLOATS.values() if name == dtype)
    for rows in _row_blocks(mapped.tensor, mapped.row_order):
        piece = _widen(rows, mapped.tensor.kind).astype(target, copy=False)
        if not np.isfinite(piece).all():
            raise CheckpointError(f"{path}: tensor {mapped.tensor.name!r} holds NaN or infinite numbers")
        yield piece


def _row_blocks(tensor: GgufTensor, row_order: np.ndarray | None) -> Iterator[np.ndarray]:
    num_rows = len(tensor.rows)
    step = max(1, _NUMBERS_PER_PIECE // max(1, tensor.shape[-1] if len(tensor.shape) > 1 else 1))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        yield tensor.rows[rows] if row_order is None else tensor.rows[row_order[rows]]


def _widen(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [num_rows, row_bytes] -> [num_rows, row_length]: float types as they are, quantised ones as float32."""
    if kind in _FLOATS:
        return np.ascontiguousarray(rows).view(_FLOATS[kind][1])
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which is found and named later
        widened: np.ndarray = dequantize(rows, kind)
    return widened
