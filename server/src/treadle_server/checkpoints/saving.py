"""Writing a model folder back: the loaded file's own tensor names, number formats and side files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from treadle_plugin_api.backend import Array, QuantisedWeight, Weight
from treadle_plugin_api.family import TensorEntry

from treadle_server.checkpoints.loading import INDEX_NAME, Checkpoint, names_in_index
from treadle_server.checkpoints.quantised_tensors import describe, file_tensors
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
    and a head identical to the embedding are left out; quantised parameters get a tensor of scales each, and
    config.json says so. The folder is made if need be. A model that it holds is replaced, its index and shards
    included; a save that is killed leaves the old model, the new one, or a folder without config.json, which does not
    load: never the weights of one with the settings of the other.
    """
    weights = like.params if params is None else params
    missing = like.params.keys() ^ weights.keys()
    if missing:
        raise CheckpointError(f"{folder}: cannot save, parameter {min(missing)!r} is missing or unknown")
    tensors: dict[str, Array] = {}
    for entry in like.table:
        tensors |= _file_tensors(entry, weights, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = dict(like.hf_config)
    if dtype is not None:
        hf_config["dtype" if "dtype" in hf_config else "torch_dtype"] = dtype
    hf_config.pop("quantization_config", None)
    quantisation = describe(weights)
    if quantisation is not None:
        hf_config["quantization_config"] = quantisation
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


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Lend a folder beside the place of a new one, which takes that place, flushed to disk, if the block ends well.

    Raises CheckpointError where there is something else than an empty folder, or where nothing can be written.
    """
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder}: holds something already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        yield partial
        partial.chmod(0o755)  # a temporary folder is closed to others
        for path in (*partial.iterdir(), partial):
            _flush(path)
        partial.replace(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _file_tensors(entry: TensorEntry, weights: Mapping[str, Weight], dtype: str | None) -> dict[str, Array]:
    """Return the tensors that an entry has in a file: one, or two where it is quantised."""
    quantised = [one for one in (weights[name] for name in entry.params) if isinstance(one, QuantisedWeight)]
    if quantised:
        return file_tensors(entry, quantised)
    return {entry.file_name: to_file_tensor(entry, weights, dtype)}


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
