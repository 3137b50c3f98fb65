"""The checkpoints of a trainer: folders under one root, named by requests that never reach outside it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.service.training.calls import read_next_number
from treadle_server.training.state_files import read_progress, settle

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PARTIAL, _PREVIOUS = ".partial", ".previous"  # a save under way, and what it replaces


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its name, the steps done, and the number of the call that follows it."""

    name: str
    step: int
    next_number: int


class CheckpointRoot:
    """Finds checkpoints by name. None as the folder: the trainer keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.absolute()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean_up(self._folder)

    def place(self, name: str) -> Path:
        """Return where a checkpoint of this name is, or would be.

        Raises:
            InvalidRequestError: the name is none that a checkpoint can have.
            TrainingError: there is no root.
        """
        if self._folder is None:
            raise TrainingError("this trainer keeps no checkpoints: start it with --checkpoint-root FOLDER")
        if not _NAME.fullmatch(name) or name.endswith((_PARTIAL, _PREVIOUS)):
            message = f"must be 1 to 100 letters, digits, '_', '-', '.', a letter or digit first, but is {name!r:.120}"
            raise InvalidRequestError.of("name", message)
        return self._folder / name

    def find(self, name: str) -> Path:
        """Return the folder of a saved checkpoint; raises CheckpointError naming those there are."""
        folder = self.place(name)
        if folder.is_symlink() or not folder.is_dir():
            known = ", ".join(saved.name for saved in self.list()) or "none"
            raise CheckpointError(f"there is no checkpoint {name!r}; saved ones: {known:.300}")
        return folder

    def list(self) -> list[SavedCheckpoint]:
        """Return the complete checkpoints, by name."""
        if self._folder is None or not self._folder.is_dir():  # somebody may have deleted it
            return []
        folders = [p for p in self._folder.iterdir() if p.is_dir() and p.suffix not in (_PARTIAL, _PREVIOUS)]
        return [saved for folder in sorted(folders) if (saved := _read(folder)) is not None]

    @staticmethod
    def _clean_up(root: Path) -> None:
        """Bring back what a killed save had moved away, and remove what it had not finished."""
        for folder in [*root.iterdir()]:
            if folder.suffix == _PREVIOUS and _read(folder) is not None:  # a trainer's, not somebody's own
                settle(folder.with_suffix(""))
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.suffix == _PARTIAL:
                shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path) -> SavedCheckpoint | None:
    try:
        step, _ = read_progress(folder)
        return SavedCheckpoint(folder.name, step, read_next_number(folder))
    except CheckpointError:  # not a checkpoint
        return None
