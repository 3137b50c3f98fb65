"""How a command fails: readable lines on stderr and an exit status, never a traceback for what a user can cause."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from treadle_server.cli.streams import discard, without_controls
from treadle_server.errors import TreadleError

if TYPE_CHECKING:
    from treadle_client import UnavailableError

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
        raise SystemExit(error.status) from error
    except TreadleError as error:
        show_errors([str(error)])
        raise SystemExit(FAILED) from error
    except KeyboardInterrupt as error:
        raise SystemExit(INTERRUPTED) from error
    except OSError as error:  # a disk that is full, a file that may not be read
        discard(sys.stdout)
        show_errors([_described(error)])
        raise SystemExit(FAILED) from error


@contextmanager
def writing_stdout() -> Iterator[None]:
    """End the command when stdout cannot be written; quietly when whoever read it has gone."""
    try:
        yield
    except OSError as error:
        discard(sys.stdout)
        gone = isinstance(error, BrokenPipeError)
        raise CommandFailedError([] if gone else [f"cannot write to stdout: {_described(error)}"]) from error


@contextmanager
def reading_stdin() -> Iterator[None]:
    """End the command when stdin cannot be read, or holds no text."""
    try:
        yield
    except OSError as error:
        raise CommandFailedError([f"cannot read stdin: {_described(error)}"]) from error
    except UnicodeDecodeError as error:
        raise wrong_use(f"what stdin holds is no {error.encoding.upper()}: {error.reason}") from error


def _described(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


@contextmanager
def client_failures(target: str) -> Iterator[None]:
    """Turn what the server at `target` answers into the command's failure; wrong fields of a request are wrong use."""
    from treadle_client import InvalidArgumentError, TreadleClientError, UnauthenticatedError, UnavailableError

    try:
        yield
    except InvalidArgumentError as error:
        raise CommandFailedError(violation_lines(error), WRONG_USE) from error
    except UnavailableError as error:
        raise CommandFailedError([_unavailable(target, error)]) from error
    except UnauthenticatedError as error:
        raise CommandFailedError([_unauthenticated(error.message)]) from error
    except TreadleClientError as error:
        raise CommandFailedError([error.message]) from error


def _unauthenticated(message: str) -> str:
    """Return what is wrong with the token, and the options that give one rather than the header that they become."""
    wrong = message.partition(": authorization")[0]
    return f"{wrong} (--token-file FILE, or the variable TREADLE_TOKEN)"


def _unavailable(target: str, error: UnavailableError) -> str:
    """Return why the server is not available, and what to do where none answers: such an error has no reason."""
    if error.reason:
        return f"the server at {target} is not available: {error.message}"
    return f"{error.message}{_advice(error.message)}"


def _advice(message: str) -> str:
    """Return what to do about a connection that could not be made, by what the client says of it."""
    if "is not trusted" in message:
        return ": give --tls-ca FILE, the certificate of who signed it"
    if "does not carry the name" in message:
        return ": give --tls-server-name NAME, one that it carries"
    if "speaks no TLS" in message:
        return ": leave out --tls and the options that imply it"
    if "closed the connection" in message:
        return ": if it speaks TLS, give --tls or --tls-ca, and --tls-cert where it asks for certificates"
    return "; start one with `treadle serve MODEL`"


def violation_lines(error: Exception) -> list[str]:
    """Return one line for each wrong field that an InvalidArgumentError of the client lists."""
    lines = [f"{field}: {message}" for field, message in getattr(error, "violations", ())]
    return lines or [str(error)]


def show_errors(lines: Sequence[str]) -> None:
    """Write each line to stderr as an error, red on a terminal."""
    try:
        for line in lines:
            typer.secho(f"error: {without_controls(line)}", fg=typer.colors.RED, err=True)
        sys.stderr.flush()
    except OSError:  # there is nobody left to tell
        discard(sys.stderr)
