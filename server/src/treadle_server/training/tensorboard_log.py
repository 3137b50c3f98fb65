"""TensorBoard event files, where the extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle_server.errors import ConfigError
from treadle_server.training.run_events import Evaluated, StepDone

_SCALARS = ("loss", "lr", "grad_norm", "tokens_per_s")


class TensorBoardLog:
    """Writes a run's scalars. Raises ConfigError where tensorboardX is missing."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self._writer: Any = _writer_class()(str(folder), purge_step=first_step + 1)

    def add(self, step: StepDone, evaluated: Evaluated | None) -> None:
        """Write a step's scalars."""
        for name in _SCALARS:
            self._writer.add_scalar(f"train/{name}", getattr(step, name), step.step)
        if evaluated is not None:
            self._writer.add_scalar("held_out/loss", evaluated.loss, step.step)

    def close(self) -> None:
        """Write what is still held."""
        self._writer.close()


def check_installed() -> None:
    """Raise ConfigError where tensorboardX is missing."""
    _writer_class()


def _writer_class() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("tensorboard: needs tensorboardX: pip install 'treadle-server[tensorboard]'") from error
    return SummaryWriter
