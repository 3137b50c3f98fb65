"""The folder of a training run.

    run.json                        the model, the data and the settings it was started with
    checkpoints/step-00000500/      a trainer's folder (see state_files) and run_state.json: the place in the data
    loss.csv, loss.png              a row a step; the same as a picture
    tensorboard/                    event files, where they are wanted
    config.json, model.safetensors  the finished model, or the adapter, with everything else that a model folder has

A checkpoint that has its name is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from treadle_server.datasets.batches import Position
from treadle_server.errors import CheckpointError
from treadle_server.training.state_files import discard
from treadle_server.training.train_config import TrainConfig, problems

_RUN_NAME, _STATE_NAME, _CHECKPOINTS = "run.json", "run_state.json", "checkpoints"
_STATE_PREFIXES = ("run_state.", "trainer_state.")  # of files that only a trainer needs
_PREFIX = "step-"
# What makes a folder a model's is put there last.
_LAST_NAMES = ("config.json", "adapter_config.json")

Model = TypeVar("Model", bound=BaseModel)


class RunSpec(BaseModel):
    """What a run was started with."""

    model_config = ConfigDict(frozen=True)

    model: str
    data: tuple[Path, ...]
    config: TrainConfig


class RunState(BaseModel):
    """Where a run is, beside its trainer's state.

    Attributes:
        fingerprint: of the data, training and held-out.
        step: steps done.
        position: the next row to be read.
        num_tokens: tokens read.
        loss: the last step's.
        best_loss: the lowest held-out loss, None before the first evaluation.
        best_step: the step that had it.
        num_worse: evaluations since.
    """

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    step: int = 0
    position: Position = Position()
    num_tokens: int = 0
    loss: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, or the place where one will be."""

    path: Path

    def create(self, spec: RunSpec) -> None:
        """Make the folder. Raises CheckpointError when something is there already."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error}") from error
        self.write_spec(spec)

    def write_spec(self, spec: RunSpec) -> None:
        """Write down what a run is, in place of what was there. Raises CheckpointError."""
        path = self.path / _RUN_NAME
        new = path.with_name(path.name + ".new")
        try:
            _write_text(new, spec.model_dump_json(indent=2, exclude_unset=True))
            new.replace(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error}") from error

    def check_free(self) -> None:
        """Raise CheckpointError unless a new run can have the folder: an empty one, or of a run that saved nothing."""
        if (self.path / _RUN_NAME).exists():
            if self.newest() is None:
                return
            raise CheckpointError(f"{self.path}: holds a training run; go on with it (--resume) or name another folder")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(f"{self.path}: is not empty; name a folder that a new model may have for itself")

    def read_spec(self) -> RunSpec:
        """Return what the run was started with. Raises CheckpointError when there is none."""
        path = self.path / _RUN_NAME
        if not path.is_file():
            raise CheckpointError(f"{self.path}: holds no training run: it has no {_RUN_NAME}")
        return _read_model(RunSpec, path)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        steps = self._steps()
        return self.checkpoint(steps[-1]) if steps else None

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.path / _CHECKPOINTS / f"{_PREFIX}{step:08d}"

    def read_state(self, checkpoint: Path) -> RunState:
        """Return the state beside a checkpoint. Raises CheckpointError."""
        return _read_model(RunState, checkpoint / _STATE_NAME)

    def save(self, state: RunState, save_trainer: Callable[[Path, Mapping[str, bytes]], None]) -> Path:
        """Have a trainer write a checkpoint, with the run's state in it. Raises CheckpointError."""
        place = self.checkpoint(state.step)
        save_trainer(place, {_STATE_NAME: (state.model_dump_json(indent=2) + "\n").encode()})
        return place

    def drop_old(self, num_kept: int, best_step: int) -> None:
        """Delete all checkpoints but the newest few and the best, and what a killed save left."""
        for leftover in (self.path / _CHECKPOINTS).glob(f"{_PREFIX}*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        for step in self._steps()[:-num_kept]:
            if step != best_step:
                discard(self.checkpoint(step))

    def publish(self, checkpoint: Path) -> None:
        """Make this folder the model folder that a checkpoint is. Raises CheckpointError."""
        files = [path for path in checkpoint.iterdir() if not path.name.startswith(_STATE_PREFIXES)]
        try:
            for path in sorted(files, key=lambda path: (path.name in _LAST_NAMES, path.name)):
                _copy(path, self.path / path.name)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error}; the model is in {checkpoint}") from error

    def _steps(self) -> list[int]:
        folders = (self.path / _CHECKPOINTS).glob(f"{_PREFIX}*")
        names = (folder.name.removeprefix(_PREFIX) for folder in folders if (folder / _STATE_NAME).is_file())
        return sorted(int(name) for name in names if name.isdecimal())


def _read_model(kind: type[Model], path: Path) -> Model:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path}: cannot be read: {problems(error)}") from error


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    """Put a file in its place at once. A link where the disk can: neither is ever written in place."""
    new = target.with_name(target.name + ".new")
    new.unlink(missing_ok=True)
    try:
        new.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, new)
    new.replace(target)
