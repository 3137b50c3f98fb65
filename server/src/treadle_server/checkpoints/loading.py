"""Opening a Hugging Face model folder: config.json, one or many safetensors files, strict names and shapes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
from treadle_plugin_api.backend import Array, Weight
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family, TensorEntry, UnsupportedSettingError

from treadle_server.checkpoints.config_file import (
    is_quantised_here,
    read_generation_config,
    read_json_object,
    read_model_config,
)
from treadle_server.checkpoints.quantised_tensors import quantised_names, read_quantised, scales_name
from treadle_server.checkpoints.safetensors_io import SafetensorsFile
from treadle_server.checkpoints.tensor_table import family_failed, read_ignored, read_tables
from treadle_server.errors import CheckpointError, UnsupportedModelError
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params, Shape, param_shapes

_log = logging.getLogger(__name__)
INDEX_NAME = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "embedding.weight", "head.weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open model folder. Weights are read from its files when asked for; close it once they have been.

    Attributes:
        folder: where it was loaded from.
        family: the family of its model_type.
        config: what its config.json describes, with `tied_head` as the tensors have it.
        params: the canonical parameters, lazy.
        table: the family's entries under the names that the files use.
        hf_config: config.json as it stands.
        generation_config: generation_config.json as it stands; empty when there is none.
    """

    folder: Path
    family: Family
    config: DecoderConfig
    params: Params
    table: tuple[TensorEntry, ...]
    hf_config: Mapping[str, object]
    generation_config: Mapping[str, object]
    _files: tuple[SafetensorsFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters as stored."""
        return self.params.num_bytes

    def close(self) -> None:
        """Close the files. Weights that were mapped stay valid; others can no longer be read."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FileWeight(Weight):
    """A canonical parameter in a file: some rows of a tensor, which may be stored transposed or in pieces.

    The tensor has `groups` equal runs of rows; the parameter is the rows from `first_row` on of each, one after the
    other. A leading axis that only cuts the rows in pieces counts as rows.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        name: str,
        shape: Shape,
        first_row: int,
        *,
        transposed: bool = False,
        groups: int = 1,
    ) -> None:
        self.shape = shape
        self.dtype = file.dtype(name).name
        self._file = file
        self._name = name
        self._transposed = transposed
        self._groups = groups
        self._rows = slice(first_row, first_row + shape[0] // groups)

    def read_into(self, out: Array) -> None:
        """Fill `out` with the values, read from the file in pieces and widened."""
        if self._transposed:
            self._file.read_columns_into(self._name, self._rows, out)
            return
        run = math.prod(self._file.tensors[self._name].shape) // (math.prod(self.shape[1:]) * self._groups)
        num_rows = self._rows.stop - self._rows.start
        for group in range(self._groups):
            piece = out[group * num_rows : (group + 1) * num_rows]
            self._file.read_rows_into(self._name, group * run + self._rows.start, piece)

    def view(self) -> Array:
        """Return the rows mapped from the file, in its dtype; copied when they lie in pieces."""
        mapped = self._file.map(self._name)
        if self._transposed:
            return mapped[:, self._rows].T
        rows = mapped.reshape(self._groups, -1, *self.shape[1:])[:, self._rows]
        return rows.reshape(self.shape)


def load_checkpoint(folder: Path, families: FamilyRegistry | None = None) -> Checkpoint:
    """Open a model folder; no weight is read yet, but every name, shape and file size is checked.

    Raises CheckpointError for a broken folder and UnsupportedModelError for one whose arithmetic treadle lacks.
    """
    hf_config, family, config = check_config(folder, families)
    tables = read_tables(family, config)
    ignored = read_ignored(family)
    files = _open_files(folder)
    try:
        tensors = _Tensors(folder, files, ignored, quantised=is_quantised_here(folder, hf_config))
        entries = tensors.choose_table(family, tables)
        config, table = tensors.settle_head(config, entries)
        params = Params(tensors.weights(config, table))
        generation_config = read_generation_config(folder)
    except BaseException:
        for file in files:
            file.close()
        raise
    return Checkpoint(
        folder,
        family,
        config,
        params,
        table,
        MappingProxyType(hf_config),
        MappingProxyType(generation_config),
        tuple(files),
    )


def check_config(
    folder: Path, families: FamilyRegistry | None = None
) -> tuple[dict[str, object], Family, DecoderConfig]:
    """Return config.json of a folder, its family and what it describes; the weights need not be there."""
    hf_config = read_model_config(folder)
    family = _find_family(folder, hf_config, families or FamilyRegistry())
    return hf_config, family, _read_config(folder, family, hf_config)


def _find_family(folder: Path, hf_config: Mapping[str, object], families: FamilyRegistry) -> Family:
    model_type = hf_config.get("model_type")
    family = families.find(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(families)
        remote = " and its own code is never run" if "auto_map" in hf_config else ""
        raise UnsupportedModelError(
            f"{folder}: model_type {model_type!r} is not supported{remote}; supported types: {known}. "
            "A plugin can add it (treadle_register_families)."
        )
    return family


def _read_config(folder: Path, family: Family, hf_config: Mapping[str, object]) -> DecoderConfig:
    try:
        config = family.config_from_hf(hf_config)
    except UnsupportedSettingError as error:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: {error}. Use a version of the model without it, or add a family as a plugin."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    except Exception as error:  # a plugin's family may raise anything
        raise family_failed(family, f"{type(error).__name__}: {error}") from error
    if not isinstance(config, DecoderConfig):
        raise family_failed(family, f"config_from_hf returned {config!r:.80}, not a DecoderConfig")
    return config


def _open_files(folder: Path) -> list[SafetensorsFile]:
    names = _shard_names(folder)
    files: list[SafetensorsFile] = []
    try:
        for name in names:
            files.append(SafetensorsFile(folder / name))  # noqa: PERF401 - those opened must be closed on error
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _shard_names(folder: Path) -> list[str]:
    """Return the names of the model's files: those in the index, else model.safetensors, else all `model*`."""
    if (folder / INDEX_NAME).exists():
        return names_in_index(folder / INDEX_NAME)
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if names:
        return names
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle and is never opened, convert it to safetensors" if pickles else ""
    raise CheckpointError(f"{folder}: has no model.safetensors{hint}")


def names_in_index(path: Path) -> list[str]:
    """Return the shards that an index names; raises CheckpointError unless each could be a file beside it."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object from tensor to file name")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00]+\.safetensors", name) or ".." in name:
            raise CheckpointError(f"{path}: tensor {tensor!r} lies in {name!r}, which is no name of a file beside it")
    return sorted(set(weight_map.values()))


class _Tensors:
    """Every tensor of a folder's files by name."""

    def __init__(
        self, folder: Path, files: list[SafetensorsFile], ignored: Sequence[re.Pattern[str]], *, quantised: bool
    ) -> None:
        self._folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                if any(pattern.fullmatch(name) for pattern in ignored):
                    continue
                if name in self._files:
                    raise CheckpointError(f"tensor {name!r} is in {self._files[name].path} and in {file.path}")
                self._files[name] = file
        self._quantised = quantised_names(self._files) if quantised else set()

    def choose_table(self, family: Family, tables: Sequence[tuple[TensorEntry, ...]]) -> list[TensorEntry]:
        """Return the entries of the family's layout that lacks the fewest tensors here, the first of equals."""
        layouts = [self._name_entries(family, table) for table in tables]
        return min(layouts, key=lambda entries: sum(entry.file_name not in self._files for entry in entries))

    def _name_entries(self, family: Family, table: tuple[TensorEntry, ...]) -> list[TensorEntry]:
        """Return the entries under the names these files use: with or without the family's optional prefix."""
        prefix = family.optional_prefix
        if not prefix or any(name.startswith(prefix) for name in self._files):
            return list(table)
        return [replace(entry, file_name=entry.file_name.removeprefix(prefix)) for entry in table]

    def settle_head(
        self, config: DecoderConfig, entries: list[TensorEntry]
    ) -> tuple[DecoderConfig, tuple[TensorEntry, ...]]:
        """Decide by the tensors that are present whether the head is the embedding; the config's flag is a hint."""
        by_param = {entry.params[0]: entry for entry in entries}
        embedding, head = by_param[_EMBEDDING], by_param[_HEAD]
        rest = [entry for entry in entries if entry.params[0] not in (_EMBEDDING, _HEAD)]
        has_embedding, has_head = embedding.file_name in self._files, head.file_name in self._files
        if has_head and not has_embedding and config.tied_head:
            return config, (replace(embedding, file_name=head.file_name), *rest)
        if not has_head:
            if not config.tied_head:
                self._warn("not tied, but %r is absent; the embedding is used", head)
            return replace(config, tied_head=True), (embedding, *rest)
        if config.tied_head and self._identical(embedding.file_name, head.file_name):
            del self._files[head.file_name]
            return config, (embedding, *rest)
        if config.tied_head:
            self._warn("tied, but %r differs from the embedding; the stored head is used", head)
        return replace(config, tied_head=False), (embedding, head, *rest)

    def _warn(self, text: str, head: TensorEntry) -> None:
        _log.warning("%s: by config.json the head is " + text, self._folder, head.file_name)

    def weights(self, config: DecoderConfig, table: tuple[TensorEntry, ...]) -> dict[str, Weight]:
        """Return every canonical parameter; raises CheckpointError for a missing, extra or mis-shaped tensor."""
        self._refuse_extra({entry.file_name for entry in table} | {scales_name(name) for name in self._quantised})
        shapes = param_shapes(config)
        weights: dict[str, Weight] = {}
        for entry in table:
            weights |= self._entry_weights(entry, shapes)
        return {name: weights[name] for name in shapes}

    def _entry_weights(self, entry: TensorEntry, shapes: Mapping[str, Shape]) -> dict[str, Weight]:
        name = entry.file_name
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is missing")
        if name in self._quantised:
            return dict(
                zip(entry.params, read_quantised(self._files, entry, [shapes[p] for p in entry.params]), strict=True)
            )
        file = self._files[name]
        rows = [shapes[param][0] for param in entry.params]
        expected = _file_shape(entry, sum(rows), shapes[entry.params[0]][1:])
        if file.tensors[name].shape != expected:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} must have shape {list(expected)} by config.json, "
                f"but has {list(file.tensors[name].shape)}"
            )
        starts = np.cumsum([0, *rows]) // entry.groups
        return {
            param: FileWeight(file, name, shapes[param], start, transposed=entry.transposed, groups=entry.groups)
            for param, start in zip(entry.params, starts.tolist(), strict=False)
        }

    def _refuse_extra(self, known: set[str]) -> None:
        extra = sorted(self._files.keys() - known)
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"{self._files[extra[0]].path}: tensor {extra[0]!r}{more} is not part of the model")

    def _identical(self, first: str, second: str) -> bool:
        a, b = self._files[first], self._files[second]
        if a.tensors[first].shape != b.tensors[second].shape or {first, second} & self._quantised:
            return False
        # Compared through the map, a piece at a time, so that a head of gigabytes is not read into memory twice.
        left, right = a.map(first), b.map(second)
        return all(np.array_equal(left[row : row + 4096], right[row : row + 4096]) for row in range(0, len(left), 4096))


def _file_shape(entry: TensorEntry, num_rows: int, row_shape: Shape) -> Shape:
    """Return the shape that a file must give a tensor of so many rows."""
    if entry.stacked:
        return (entry.stacked, num_rows // entry.stacked, *row_shape)
    return (*row_shape, num_rows) if entry.transposed else (num_rows, *row_shape)
