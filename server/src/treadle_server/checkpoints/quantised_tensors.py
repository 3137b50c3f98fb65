"""Quantised matrices in files: a tensor of numbers under the family's own name, and one of scales beside it.

    NAME        I8 [out, in]; int4 is U8 [out, (in + 1) // 2]: two numbers a byte, 8 more than they are, the first low
    NAME_scale  BF16 [out, groups of 32]

A tensor that holds several parameters holds their rows as the family's table says, but none is stored transposed: the
groups run along `in`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from treadle_plugin_api.backend import GROUP_SIZE, QUANTISED_BITS, Array, QuantisedWeight, Weight
from treadle_plugin_api.family import TensorEntry

from treadle_server.checkpoints.config_file import QUANTISED_BY
from treadle_server.checkpoints.safetensors_io import SafetensorsFile
from treadle_server.errors import CheckpointError
from treadle_server.model.params import Shape

# The format of a tensor in a file, and of its numbers.
FORMATS = {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}


def scales_name(name: str) -> str:
    """Return the name of the tensor that has a quantised tensor's scales."""
    return f"{name}_scale"


def quantised_names(files: Mapping[str, SafetensorsFile]) -> set[str]:
    """Return the names of the quantised tensors among those of a folder."""
    return {name for name, file in files.items() if file.tensors[name].dtype in FORMATS}


def read_quantised(
    files: Mapping[str, SafetensorsFile], entry: TensorEntry, shapes: Sequence[Shape]
) -> list[QuantisedWeight]:
    """Return the parameters of an entry, given their shapes, mapped from the files.

    Raises CheckpointError unless numbers and scales are there in the shapes that they must have.
    """
    name, (_, num_columns) = entry.file_name, shapes[0]
    num_rows = [shape[0] for shape in shapes]
    stored = files[name].tensors[name].dtype
    width = num_columns if stored == "I8" else (num_columns + 1) // 2
    numbers = _map(files, name, stored, _file_shape(entry, sum(num_rows), width))
    scales = _map(files, scales_name(name), "BF16", _file_shape(entry, sum(num_rows), -(-num_columns // GROUP_SIZE)))
    parts = zip(_rows_of(numbers, entry, num_rows), _rows_of(scales, entry, num_rows), strict=True)
    return [QuantisedWeight(own, own_scales, num_columns) for own, own_scales in parts]


def file_tensors(entry: TensorEntry, weights: Sequence[QuantisedWeight]) -> dict[str, Array]:
    """Return the two tensors of an entry, put together from its parameters: the inverse of reading."""
    name = entry.file_name
    numbers, scales = ([getattr(weight, part) for weight in weights] for part in ("numbers", "scales"))
    return {name: _joined(entry, numbers), scales_name(name): _joined(entry, scales)}


def describe(weights: Mapping[str, Weight]) -> dict[str, object] | None:
    """Return what config.json says of quantised weights, None where there are none."""
    bits = {QUANTISED_BITS[weight.dtype] for weight in weights.values() if weight.dtype in QUANTISED_BITS}
    return {"quant_method": QUANTISED_BY, "bits": min(bits), "group_size": GROUP_SIZE} if bits else None


def _file_shape(entry: TensorEntry, num_rows: int, width: int) -> Shape:
    return (entry.stacked, num_rows // entry.stacked, width) if entry.stacked else (num_rows, width)


def _map(files: Mapping[str, SafetensorsFile], name: str, stored: str, shape: Shape) -> Array:
    if name not in files:
        raise CheckpointError(f"tensor {name!r}, the scales of a quantised one, is missing")
    file = files[name]
    info = file.tensors[name]
    if (info.dtype, info.shape) != (stored, shape):
        raise CheckpointError(
            f"{file.path}: tensor {name!r} must be {stored} {list(shape)} by config.json, "
            f"but is {info.dtype} {list(info.shape)}"
        )
    dtype = FORMATS.get(stored) or file.dtype(name)
    return file.map_bytes(name).view(dtype).reshape(-1, shape[-1])


def _rows_of(tensor: Array, entry: TensorEntry, num_rows: Sequence[int]) -> list[Array]:
    """Cut `[rows, width]` into the parameters' own rows."""
    grouped = tensor.reshape(entry.groups, -1, tensor.shape[1])
    starts = np.cumsum([0, *num_rows]) // entry.groups
    cuts = itertools.pairwise(starts.tolist())
    return [grouped[:, start:stop].reshape(-1, tensor.shape[1]) for start, stop in cuts]


def _joined(entry: TensorEntry, parts: Sequence[Array]) -> Array:
    grouped = [part.reshape(entry.groups, -1, part.shape[1]) for part in parts]
    joined = np.concatenate(grouped, axis=1)
    num_rows = math.prod(joined.shape[:2])
    return np.ascontiguousarray(joined.reshape(_file_shape(entry, num_rows, joined.shape[2])))
