"""A trainer's folder: a model folder that any server loads, and two files more with what the next step needs.

    trainer_state.json           format, step, optimizer
    trainer_state.safetensors    <state name>/<parameter>: the optimizer's arrays; weight/<parameter>: the trained
                                 numbers, where the model's files hold them rounded

A folder is written beside its place, flushed, and renamed. One that a trainer saved there before is renamed away first
and deleted last: whoever kills the process finds it as `<name>.previous`, and `settle` brings it back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.checkpoints.config_file import read_json_object
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.errors import CheckpointError, CheckpointWriteError

_JSON_NAME, _TENSORS_NAME = "trainer_state.json", "trainer_state.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer has beside the model's own files.

    Attributes:
        step: steps done.
        optimizer: the optimizer's name.
        tensors: its arrays, and the parameters that the model's files round, under the names of the file.
    """

    step: int
    optimizer: str
    tensors: Mapping[str, Array]

    def exact(self) -> dict[str, Array]:
        """Return the trained numbers that the model's own files have rounded."""
        return {name.removeprefix("weight/"): one for name, one in self.tensors.items() if name.startswith("weight/")}


def write_state(folder: Path, state: TrainerState, files: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Write both files into a folder, and further ones by name; each is read back."""
    write_safetensors(folder / _TENSORS_NAME, state.tensors)
    settings = {"format": _FORMAT, "step": state.step, "optimizer": state.optimizer}
    for name, content in {_JSON_NAME: (json.dumps(settings, indent=2) + "\n").encode(), **files}.items():
        (folder / name).write_bytes(content)
        if (folder / name).read_bytes() != content:
            raise CheckpointError(f"{folder / name}: reads back different from what was written")


def read_state(folder: Path) -> TrainerState:
    """Read both files; raises CheckpointError when they are absent or broken."""
    step, optimizer = read_progress(folder)
    return TrainerState(step, optimizer, _read_tensors(folder / _TENSORS_NAME))


def read_progress(folder: Path) -> tuple[int, str]:
    """Return the steps done and the optimizer's name; raises CheckpointError when the file is absent or broken."""
    path = folder / _JSON_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {_JSON_NAME}: no trainer saved its state here")
    settings = read_json_object(path)
    step, optimizer = settings.get("step"), settings.get("optimizer")
    if settings.get("format") != _FORMAT or not isinstance(step, int) or not isinstance(optimizer, str) or step < 0:
        raise CheckpointError(f"{path}: must have format {_FORMAT}, a step and an optimizer, but is {settings!r:.200}")
    return step, optimizer


def _read_tensors(path: Path) -> dict[str, Array]:
    file = SafetensorsFile(path)
    try:
        return {name: np.array(file.map(name)) for name in file.tensors}
    finally:
        file.close()


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder and put it in the place of `folder`, all of it or nothing.

    Only a folder that a trainer saved is replaced. Raises CheckpointError; CheckpointWriteError when the disk takes it
    not or not as it was.
    """
    folder = folder.absolute()
    settle(folder)
    if folder.exists() and not (folder / _JSON_NAME).is_file():
        raise CheckpointError(f"{folder}: exists and was not saved by a trainer; it is never replaced, name another")
    partial, previous = folder.with_name(folder.name + ".partial"), _previous(folder)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if folder.exists():
            discard(previous)  # of a save that was killed when its own was in place
            folder.rename(previous)
        partial.rename(folder)
        _flush(folder.parent)
        discard(previous)
    except (OSError, CheckpointError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__ or error
        raise CheckpointWriteError(f"{folder}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        settle(folder)


def settle(folder: Path) -> None:
    """Bring back the folder that a killed save had renamed away."""
    if not folder.exists() and (_previous(folder) / _JSON_NAME).is_file():
        _previous(folder).rename(folder)


def discard(folder: Path) -> None:
    """Delete a folder if it is there; of a link to one, the link alone.

    It is renamed first: whoever kills the process leaves no half of it under its name.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(folder.name + ".partial")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
