"""loss.csv: a row a step. What a resumed run does again is cut off first, so the file is that of one run."""

from __future__ import annotations

import csv
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from treadle_server.errors import CheckpointError
from treadle_server.training.run_events import Evaluated, StepDone

COLUMNS = ("step", "epochs", "num_tokens", "loss", "lr", "grad_norm", "held_out_loss", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class LossRow:
    """What a curve needs of a row."""

    step: int
    loss: float
    held_out_loss: float | None


class LossLog:
    """Appends rows to the file; raises CheckpointError where it cannot be read or written."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self._path = path
        try:
            kept = [row for row in _read(path) if int(row["step"]) <= first_step] if first_step else []
            new = path.with_name(path.name + ".new")
            with new.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(kept)
            new.replace(path)
            self._file = path.open("a", newline="", encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: cannot be written or read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what a full disk did not take was said when it was added
            self._file.close()

    def add(self, step: StepDone, evaluated: Evaluated | None) -> None:
        """Write a step's row; it is in the file when this returns."""
        held_out = "" if evaluated is None else repr(evaluated.loss)
        numbers = (step.epochs, step.num_tokens, step.loss, step.lr, step.grad_norm)
        try:
            csv.writer(self._file).writerow([step.step, *map(repr, numbers), held_out, f"{step.tokens_per_s:.1f}"])
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {os.strerror(error.errno or 0)}") from error


def read_losses(path: Path) -> list[LossRow]:
    """Return the rows of a loss.csv."""
    return [
        LossRow(int(row["step"]), float(row["loss"]), float(row["held_out_loss"]) if row["held_out_loss"] else None)
        for row in _read(path)
    ]


def _read(path: Path) -> list[dict[str, str]]:
    """Return the complete rows; a process that was killed may have left half a one."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    return [row for row in rows if None not in row.values() and row["tokens_per_s"]]
