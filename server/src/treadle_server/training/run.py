"""A whole training run: data in, a better model folder out, with everything that may happen on the way.

>>> run = TrainingRun.start("path/to/hf-folder", [Path("stories.jsonl")], Path("better"), TrainConfig(steps=1000))
>>> result = run.run(print)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from treadle_server.datasets import Prefetcher, TokenBatch
from treadle_server.errors import CheckpointError, ConfigError, TrainingError, TreadleError
from treadle_server.plugins import PluginManager
from treadle_server.training.loss_curve import draw_losses
from treadle_server.training.loss_log import LossLog, read_losses
from treadle_server.training.results import LossResult
from treadle_server.training.run_data import RunData
from treadle_server.training.run_events import (
    CheckpointSaved,
    Evaluated,
    RunEvent,
    RunResult,
    Status,
    StepDone,
    perplexity,
)
from treadle_server.training.run_folder import RunFolder, RunSpec, RunState
from treadle_server.training.tensorboard_log import TensorBoardLog, check_installed
from treadle_server.training.train_config import TrainConfig, changed_config
from treadle_server.training.trainer import Trainer

Report = Callable[[RunEvent], None]


class TrainingRun:
    """A run in a folder of its own, new or resumed.

    A resumed run goes on from its newest checkpoint and does, bit for bit, what it would have done.

    Attributes:
        model: name or folder of the model that it began with.
        config: its settings.
        trainer: the model in training.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        resumed_from: Path | None = None,
        *,
        plugins: PluginManager | None = None,
    ) -> None:
        self.model = spec.model
        self.config = spec.config
        if self.config.tensorboard:
            check_installed()
        self._folder = folder
        self.trainer = load_trainer(spec.model, self.config, plugins)
        self._data = RunData.open(spec, self.trainer.config)
        self._state = RunState(fingerprint=self._data.fingerprint)
        if resumed_from is not None:
            self._state = self._resumed_state(resumed_from)
            self.trainer.load_state(resumed_from)
        self._stop = threading.Event()

    @classmethod
    def start(
        cls,
        model: str | Path,
        data: Sequence[Path],
        out: Path,
        config: TrainConfig | None = None,
        *,
        plugins: PluginManager | None = None,
    ) -> Self:
        """Prepare a new run of a model, by name or folder, on files or folders of data; `plugins` as for a Trainer.

        Raises CheckpointError when `out` is not free, ConfigError, DataError, and what loading a model raises.
        """
        folder = RunFolder(out)
        folder.check_free()
        spec = RunSpec(
            model=str(Path(model).absolute() if Path(model).exists() else model),
            data=tuple(Path(path).absolute() for path in data),
            config=config or TrainConfig(),
        )
        run = cls(spec, folder, plugins=plugins)
        folder.create(spec)
        return run

    @classmethod
    def resume(
        cls, out: Path, changes: Mapping[str, Any] | None = None, *, plugins: PluginManager | None = None
    ) -> Self:
        """Go on with the run in a folder from its newest checkpoint, or from the start where it has none.

        `changes` are settings that may change, such as steps. Raises CheckpointError, ConfigError, and what `start`
        does.
        """
        folder = RunFolder(out)
        spec = folder.read_spec()
        spec = spec.model_copy(update={"config": changed_config(spec.config, changes or {})})
        run = cls(spec, folder, folder.newest(), plugins=plugins)
        folder.write_spec(spec)
        return run

    def stop(self) -> None:
        """End `run` after the step that is under way, with a checkpoint. May be called from anywhere."""
        self._stop.set()

    def run(self, report: Report = lambda event: None) -> RunResult:
        """Train to the end, telling what happens. Raises TreadleError; the newest checkpoint is complete then too."""
        with self._logs() as logs, Prefetcher(self._data.stream.batches(self._state.position)) as batches:
            while (status := self._over()) is None:
                with self._named_failures():
                    step = self._step(batches)
                    report(step)
                    evaluated = self._evaluate_if_due(step, report)
                    logs.add(step, evaluated)
                    self._save_if_due(evaluated, report)
        with self._named_failures():
            self._save(report)
            return self._finish(status)

    # ---- the parts of a step ----------------------------------------------------------------------------------------

    def _step(self, batches: Prefetcher[TokenBatch]) -> StepDone:
        began_s = time.perf_counter()
        state = self._state
        taken = list(self._take(batches))
        rate = self.config.learning_rate(state.step, self._num_steps())
        try:
            losses = [self._forward_backward(batch) for batch in taken]
            done = self.trainer.optim_step(
                lr=rate,
                weight_decay=self.config.weight_decay,
                grad_clip_norm=self.config.grad_clip_norm or None,
                **self.config.optimizer_options(),
            )
        except TreadleError:
            self.trainer.zero_gradients()
            raise
        num_counted = sum(result.num_tokens for result in losses)
        loss = sum(result.loss * result.num_tokens for result in losses) / num_counted
        num_tokens = sum(batch.num_tokens for batch in taken)
        self._state = state.model_copy(
            update={
                "step": done.step,
                "position": taken[-1].after,
                "num_tokens": state.num_tokens + num_tokens,
                "loss": loss,
            }
        )
        return StepDone(
            step=done.step,
            num_steps=self._num_steps(),
            epochs=self._epochs(),
            num_tokens=self._state.num_tokens,
            loss=loss,
            lr=rate,
            grad_norm=done.grad_norm,
            tokens_per_s=num_tokens / (time.perf_counter() - began_s),
        )

    def _forward_backward(self, batch: TokenBatch) -> LossResult:
        config = self.config
        return self.trainer.forward_backward(batch.rows, label_smoothing=config.label_smoothing, z_loss=config.z_loss)

    def _take(self, batches: Prefetcher[TokenBatch]) -> Iterator[TokenBatch]:
        """Yield the batches of one step; fewer at the end of the last epoch."""
        for _ in range(self.config.accumulate):
            batch = next(batches)
            yield batch
            if batch.after.epoch == self.config.num_epochs:
                return

    def _evaluate_if_due(self, step: StepDone, report: Report) -> Evaluated | None:
        due = step.step % self.config.eval_interval == 0 or self._reached_end()
        if not (due and self._data.held_out):
            return None
        loss = self.held_out_loss()
        state = self._state
        is_best = state.best_loss is None or loss < state.best_loss
        better = {"best_loss": loss, "best_step": step.step, "num_worse": 0}
        self._state = state.model_copy(update=better if is_best else {"num_worse": state.num_worse + 1})
        evaluated = Evaluated(step=step.step, loss=loss, is_best=is_best)
        report(evaluated)
        return evaluated

    def held_out_loss(self) -> float:
        """Return the mean loss of all held-out tokens in nats, without smoothing and the like."""
        results = [self.trainer.compute_loss(batch.rows) for batch in self._data.held_out]
        return sum(result.loss * result.num_tokens for result in results) / sum(result.num_tokens for result in results)

    def _save_if_due(self, evaluated: Evaluated | None, report: Report) -> None:
        if self._state.step % self.config.checkpoint_interval == 0 or (evaluated is not None and evaluated.is_best):
            self._save(report)

    def _save(self, report: Report) -> None:
        if self._folder.checkpoint(self._state.step).exists():
            return

        def save_trainer(place: Path, files: Mapping[str, bytes]) -> None:
            self.trainer.save(place, dtype=self.config.save_dtype, files=files)

        place = self._folder.save(self._state, save_trainer)
        self._folder.drop_old(self.config.keep_checkpoints, self._state.best_step)
        draw_losses(read_losses(self._folder.path / "loss.csv"), self._folder.path / "loss.png")
        report(CheckpointSaved(step=self._state.step, folder=place))

    # ---- where the run is -------------------------------------------------------------------------------------------

    def _over(self) -> Status | None:
        """Return why the run is over, None while it is not."""
        if self._reached_end():
            return "finished"
        if self.config.patience and self._state.num_worse >= self.config.patience:
            return "stopped_early"
        return "interrupted" if self._stop.is_set() else None

    def _reached_end(self) -> bool:
        if self.config.steps is not None:
            return self._state.step >= self.config.steps
        return self._state.position.epoch >= (self.config.num_epochs or 1)

    def _epochs(self) -> float:
        return self._data.stream.epochs_done(self._state.position)

    def _num_steps(self) -> int:
        """Return the steps of the whole run: as set, or what the data read so far lets expect."""
        if self.config.steps is not None:
            return self.config.steps
        epochs, wanted = self._epochs(), self.config.num_epochs or 1
        expected = round(self._state.step * wanted / epochs) if epochs else 0
        return max(self._state.step if epochs >= wanted else self._state.step + 1, expected)

    def _finish(self, status: Status) -> RunResult:
        state, folder = self._state, self._folder
        best = state.best_step or state.step
        if status != "interrupted":
            folder.publish(folder.checkpoint(best))
        return RunResult(
            status=status,
            folder=folder.path,
            checkpoint=folder.checkpoint(state.step),
            step=state.step,
            epochs=self._epochs(),
            num_tokens=state.num_tokens,
            loss=state.loss,
            best_step=best,
            held_out_loss=state.best_loss,
            perplexity=None if state.best_loss is None else perplexity(state.best_loss),
        )

    def _resumed_state(self, checkpoint: Path) -> RunState:
        state = self._folder.read_state(checkpoint)
        if state.fingerprint != self._data.fingerprint:
            raise ConfigError("the data has changed since the run was started: it cannot go on where it was")
        return state

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Say how far training came when it failed, and where the newest checkpoint is."""
        try:
            yield
        except (TrainingError, CheckpointError) as error:
            newest = self._folder.newest()
            kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
            raise type(error)(f"after {self._state.step} steps: {error}; {kept}") from error

    @contextmanager
    def _logs(self) -> Iterator[_Logs]:
        with LossLog(self._folder.path / "loss.csv", self._state.step) as losses:
            board = self._folder.path / "tensorboard"
            logs = _Logs(losses, TensorBoardLog(board, self._state.step) if self.config.tensorboard else None)
            try:
                yield logs
            finally:
                if logs.board is not None:
                    logs.board.close()


@dataclass(frozen=True, slots=True)
class _Logs:
    """Where each step is written down."""

    losses: LossLog
    board: TensorBoardLog | None = field(default=None)

    def add(self, step: StepDone, evaluated: Evaluated | None) -> None:
        self.losses.add(step, evaluated)
        if self.board is not None:
            self.board.add(step, evaluated)


def load_trainer(model: str, config: TrainConfig, plugins: PluginManager | None) -> Trainer:
    """Load a model to be trained as the settings say."""
    return Trainer.load(
        model,
        dtype=config.dtype,
        backend=config.backend,
        optimizer=config.optimizer,
        frozen=config.frozen,
        no_decay=config.no_decay,
        lora=config.lora(),
        recompute=config.recompute,
        plugins=plugins,
    )
