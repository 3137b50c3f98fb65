"""How a command fails: readable lines on stderr and an exit status, never a traceback for what a user can cause."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from treadle_server.errors import TreadleError

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class CommandFailedError(Exception):
    """Raised to end a command with lines for the user and an exit status."""

    def __init__(self, lines: Sequence[str], status: int = FAILED) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)
        self.status = status


def wrong_use(message: str) -> CommandFailedError:
    """Make the error for arguments that do not go together."""
    return CommandFailedError([message], WRONG_USE)


@contextmanager
def reported_failures() -> Iterator[None]:
    """Turn the failures of a command into lines on stderr and an exit status."""
    try:
        yield
    except CommandFailedError as error:
        show_errors(error.lines)
        raise typer.Exit(error.status) from error
    except TreadleError as error:
        show_errors([str(error)])
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # Whoever read the output has gone. What is still buffered must not raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from error


@contextmanager
def client_failures(target: str) -> Iterator[None]:
    """Turn what the server at `target` answers into the command's failure; wrong fields of a request are wrong use."""
    from treadle_client import InvalidArgumentError, TreadleClientError, UnavailableError

    try:
        yield
    except InvalidArgumentError as error:
        raise CommandFailedError(violation_lines(error), WRONG_USE) from error
    except UnavailableError as error:
        raise CommandFailedError([f"the server at {target} is not available: {error.message}"]) from error
    except TreadleClientError as error:
        raise CommandFailedError([error.message]) from error


def violation_lines(error: Exception) -> list[str]:
    """Return one line for each wrong field that an InvalidArgumentError of the client lists."""
    lines = [f"{field}: {message}" for field, message in getattr(error, "violations", ())]
    return lines or [str(error)]


def show_errors(lines: Sequence[str]) -> None:
    """Write each line to stderr as an error, red on a terminal."""
    for line in lines:
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
