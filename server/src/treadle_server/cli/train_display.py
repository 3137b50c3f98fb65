"""What `treadle train` shows while it trains: a bar on a terminal, a line now and then elsewhere; all on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treadle_server.cli.streams import discard, without_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from treadle_server.training.run_events import RunEvent, StepDone

Report = Callable[["RunEvent"], None]

_LINE_INTERVAL_S = 10.0


@contextmanager
def showing() -> Iterator[Report]:
    """Lend what shows a run's events."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        bars.BarColumn(),
        bars.TextColumn("loss {task.fields[loss]:.4f}"),
        bars.TextColumn("{task.fields[speed]:.0f} tokens/s"),
        bars.TimeRemainingColumn(compact=True),
        bars.TextColumn("left"),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as display:
        yield _Bar(display)


class _Bar:
    """Shows steps as a bar, and the rest as lines above it."""

    def __init__(self, display: Progress) -> None:
        self._display = display
        self._task: TaskID | None = None

    def __call__(self, event: RunEvent) -> None:
        text = _remark(event)
        if text is not None:
            self._display.console.print(text, markup=False, highlight=False)
            return
        step: StepDone = event  # type: ignore[assignment]  # what is no remark is a step
        if self._task is None:
            before = step.step - 1  # of a resumed run: what was done then says nothing of today's speed
            self._task = self._display.add_task("", completed=before, total=step.num_steps, loss=0.0, speed=0.0)
        self._display.update(
            self._task, completed=step.step, total=step.num_steps, loss=step.loss, speed=step.tokens_per_s
        )


class _Lines:
    """Writes a line for the first step, then every ten seconds."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._last_s = -_LINE_INTERVAL_S
        self._first_step = 0

    def __call__(self, event: RunEvent) -> None:
        text = _remark(event)
        if text is not None:
            show_remark(text)
            return
        step: StepDone = event  # type: ignore[assignment]  # what is no remark is a step
        now_s = time.monotonic()
        self._first_step = self._first_step or step.step
        if now_s - self._last_s >= _LINE_INTERVAL_S:
            self._last_s = now_s
            show_remark(self._line(step, now_s - self._began_s))

    def _line(self, step: StepDone, elapsed_s: float) -> str:
        left_s = (step.num_steps - step.step) * elapsed_s / (step.step - self._first_step + 1)
        return (
            f"step {step.step}/{step.num_steps}: loss {step.loss:.4f}, {step.tokens_per_s:.0f} tokens/s, "
            f"{format_duration(left_s)} left"
        )


def show_remark(text: str) -> None:
    """Write a line to stderr; where it cannot be written, training goes on."""
    try:
        sys.stderr.write(without_controls(text) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def format_duration(seconds: float) -> str:
    """Return a time for people: 1:02:03, or 2:03 under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _remark(event: RunEvent) -> str | None:
    """Return the line for an evaluation or a checkpoint, None for a step."""
    from treadle_server.training.run_events import CheckpointSaved, Evaluated

    if isinstance(event, Evaluated):
        best = ", the best so far" if event.is_best else ""
        return f"step {event.step}: held-out loss {event.loss:.4f}, perplexity {event.perplexity:.2f}{best}"
    if isinstance(event, CheckpointSaved):
        return f"step {event.step}: saved {event.folder}"
    return None
