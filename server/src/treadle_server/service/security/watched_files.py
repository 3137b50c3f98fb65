"""Notices that files have changed, without looking at them more than once a second."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from treadle_server.errors import ConfigError

_INTERVAL_S: Final = 1.0
_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Tells when one of some files is another than before. Not for several threads at once."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._looked_s = clock()
        self._stamp = self.stamp()

    def stamp(self) -> _Stamp:
        """Return what a file that is written or replaced changes: time of change, size and inode; None if missing."""
        return tuple(map(_stamp, self._paths))

    def changed(self) -> bool:
        """Whether a file has changed since the last call that looked; False within a second of that."""
        now_s = self._clock()
        if now_s - self._looked_s < _INTERVAL_S:
            return False
        self._looked_s = now_s
        before, self._stamp = self._stamp, self.stamp()
        return before != self._stamp


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_file(path: Path, what: str, max_bytes: int, *, secret: bool) -> bytes:
    """Return what a file of the operator holds. Its content never comes into an error.

    Args:
        path: the file.
        what: what it is, for the error.
        max_bytes: largest size.
        secret: whether to refuse a file that every user of the machine may read or write.

    Raises:
        ConfigError: the file cannot be read, is too large, or lies open.
    """
    try:
        with path.open("rb") as file:
            if secret:
                _refuse_open_to_all(path, what, os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"the {what} {path} is larger than {max_bytes} bytes")
    return content


def _refuse_open_to_all(path: Path, what: str, mode: int) -> None:
    """Refuse a file that other users can read; Windows keeps no such bits."""
    if os.name == "posix" and mode & stat.S_IRWXO:
        shown = f"{stat.S_IMODE(mode):04o}"
        raise ConfigError(f"every user of this machine has access to the {what} {path} (mode {shown}); chmod 600 it")
