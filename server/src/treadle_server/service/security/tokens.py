"""Bearer tokens: a file that says who may do what, and the check of a token against it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from treadle_server.errors import ConfigError
from treadle_server.service.security.permissions import Role
from treadle_server.service.security.watched_files import WatchedFiles, read_file

_LOG = logging.getLogger(__name__)
_MAX_FILE_BYTES: Final = 1 << 20
# 16 characters of base64 are 96 bits: shorter ones are words, and words can be guessed.
_MIN_TOKEN_LENGTH: Final = 16
_TOKEN: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the name that limits and errors use, and the role."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the file; of the token only its SHA-256 is kept."""

    caller: Caller
    digest: bytes = field(repr=False)


class TokenFile:
    """The tokens of a file, one a line: `ROLE TOKEN` or `NAME ROLE TOKEN`; `#` starts a comment line.

    The file is read again when it changes, looked at once a second at most. One that cannot be used any more leaves
    the tokens as they were, and the log says so.

    Raises:
        ConfigError: the file cannot be used when the server starts.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._watched = WatchedFiles([path], clock)
        self._entries = _read(path)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, token: str) -> Caller | None:
        """Return whose token this is; None for nobody's. The time it takes tells nothing about the tokens."""
        with self._lock:
            if self._watched.changed():
                self._reload()
        digest = _digest(token)
        found = None
        for entry in self._entries:  # all of them: an early end would tell which one it was
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    def reload(self) -> None:
        """Read the file now, whether it has changed or not."""
        with self._lock:
            self._reload()

    def _reload(self) -> None:
        try:
            self._entries = _read(self._path)
        except ConfigError as error:
            _LOG.error("the tokens stay as they were: %s", error)
        else:
            _LOG.info("read %d tokens from %s", len(self._entries), self._path)


def _read(path: Path) -> tuple[_Entry, ...]:
    content = read_file(path, "token file", _MAX_FILE_BYTES, secret=True)
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is not UTF-8") from error
    entries = tuple(_entries(path, lines))
    if not entries:
        raise ConfigError(f"the token file {path} holds no token; a line is: [NAME] ROLE TOKEN")
    if len({entry.digest for entry in entries}) < len(entries):
        raise ConfigError(f"the token file {path} holds a token twice")
    return entries


def _entries(path: Path, lines: list[str]) -> Iterator[_Entry]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                yield _entry(words, number)
            except ConfigError as error:
                raise ConfigError(f"line {number} of the token file {path} {error}") from None


def _entry(words: list[str], number: int) -> _Entry:
    """Return what a line says. Errors show none of its words: any of them may be the token."""
    if len(words) not in {2, 3}:
        raise ConfigError(f"has {len(words)} words; expected ROLE TOKEN or NAME ROLE TOKEN")
    *name, role, token = words
    if role not in set(Role):
        raise ConfigError(f"names no role where one is expected: {', '.join(Role)}")
    if len(token) < _MIN_TOKEN_LENGTH or _TOKEN.fullmatch(token) is None:
        raise ConfigError(f"has no token of {_MIN_TOKEN_LENGTH} or more visible ASCII characters")
    return _Entry(Caller(name[0] if name else f"{role}@{number}", Role(role)), _digest(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
