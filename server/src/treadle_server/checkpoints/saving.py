"""Writing a model folder back: the loaded file's own tensor names, number formats and side files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from treadle_plugin_api.backend import Array, Weight
from treadle_plugin_api.family import TensorEntry

from treadle_server.checkpoints.loading import INDEX_NAME, Checkpoint, names_in_index
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.errors import CheckpointError

# What a tokenizer and a generation need beside config.json and the weights.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def save_checkpoint(
    folder: Path, like: Checkpoint, params: Mapping[str, Weight] | None = None, dtype: str | None = None
) -> None:
    """Write a folder that loads like `like`, with other values if `params` are given.

    Tensors keep the names of `like`'s files and, unless `dtype` names another, their number format; ignored buffers
    and a head identical to the embedding are left out. The folder is made if need be. A model that it holds is
    replaced, its index and shards included; a save that is killed leaves the old model, the new one, or a folder
    without config.json, which does not load: never the weights of one with the settings of the other.
    """
    weights = like.params if params is None else params
    missing = like.params.keys() ^ weights.keys()
    if missing:
        raise CheckpointError(f"{folder}: cannot save, parameter {min(missing)!r} is missing or unknown")
    tensors = {entry.file_name: to_file_tensor(entry, weights, dtype) for entry in like.table}
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = dict(like.hf_config)
    if dtype is not None:
        hf_config["dtype" if "dtype" in hf_config else "torch_dtype"] = dtype
    settings = (json.dumps(hf_config, indent=2, ensure_ascii=False) + "\n").encode()
    written = folder / "model.safetensors.new"
    write_safetensors(written, tensors)  # whatever can fail, such as a full disk, does so before anything is replaced
    path = folder / "config.json"
    if path.is_file() and path.read_bytes() != settings:
        path.unlink()
    written.replace(folder / "model.safetensors")
    _drop_shards(folder)
    _replace(path, settings)
    for name in SIDE_FILES:
        source = like.folder / name
        if source.is_file() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)


def _drop_shards(folder: Path) -> None:
    """Remove the index, which the loader prefers to model.safetensors, and then the shards, which nothing reads now."""
    index = folder / INDEX_NAME
    if not index.exists():
        return
    try:
        shards = {*names_in_index(index)} - {"model.safetensors"}
    except CheckpointError:  # it names no files beside it
        shards = set()
    index.unlink()
    for shard in shards:
        with contextlib.suppress(OSError):  # Windows keeps files that are mapped; it only takes room
            (folder / shard).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is there in full or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def to_file_tensor(entry: TensorEntry, weights: Mapping[str, Weight], dtype: str | None = None) -> Array:
    """Return one file tensor, C-contiguous, put together from its canonical parameters: the inverse of loading."""
    parts = [weights[name].view() for name in entry.params]
    if entry.groups > 1:
        grouped = [part.reshape(entry.groups, -1, *part.shape[1:]) for part in parts]
        joined = np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])
    else:
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if entry.stacked:
        joined = joined.reshape(entry.stacked, -1, *joined.shape[1:])
    tensor = joined.T if entry.transposed else joined
    return np.ascontiguousarray(tensor, dtype=None if dtype is None else _numpy_dtype(dtype))


def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
