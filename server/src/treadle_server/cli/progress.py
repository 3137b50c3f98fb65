"""Shows on a terminal that something takes long: nothing for the first second, then a spinner or a bar on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0


@contextmanager
def spinner(description: str) -> Iterator[None]:
    """Show a spinner when the block takes over a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(description)
    with _delayed(status.start, status.stop):
        yield


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Lend a callback (description, bytes done, bytes in all or 0) whose bars show when the block takes over a second.

    Each new description begins a new bar.
    """
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    display = bars.Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    tasks: dict[str, bars.TaskID] = {}

    def advance(description: str, done_bytes: int, total_bytes: int) -> None:
        if description not in tasks:
            tasks[description] = display.add_task(description, total=None)
        display.update(tasks[description], completed=done_bytes, total=total_bytes or None)

    with _delayed(display.start, display.stop):
        yield advance


@contextmanager
def _delayed(start: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """Call `start` unless the block ends within a second; call `stop` at its end if so."""
    timer = threading.Timer(_PATIENCE_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        stop()
