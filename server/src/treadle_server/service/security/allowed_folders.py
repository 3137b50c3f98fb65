"""Which folders an RPC may name: those under the roots that the server was started with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from treadle_server.errors import AccessDeniedError, InvalidRequestError, ModelNotFoundError


class AllowedFolders:
    """The roots, and what lies under them once every symbolic link is followed.

    A folder whose links change between the check and the reading is the business of whoever may write under a root.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)

    def find(self, field: str, text: str) -> Path:
        """Return the folder of a path, without links.

        Raises:
            InvalidRequestError: the path is not absolute, or no path.
            AccessDeniedError: it, or a file in it, is not under a root; whether it exists is not told.
            ModelNotFoundError: there is no such folder.
        """
        if not Path(text).is_absolute() or "\0" in text:
            raise InvalidRequestError.of(field, f"must be the absolute path of a folder, got {text[:200]!r}")
        if not self._roots:
            raise AccessDeniedError(
                f"{field}: this server takes no folders by RPC; start it with --model-root DIR to allow those under DIR"
            )
        folder = Path(os.path.realpath(text))
        self._check(field, folder, text)
        try:
            entries = [entry for entry in folder.iterdir() if entry.is_symlink()]
        except OSError as error:
            raise ModelNotFoundError(text, is_folder=True) from error
        for entry in entries:
            self._check(field, Path(os.path.realpath(entry)), str(entry))
        return folder

    def _check(self, field: str, resolved: Path, text: str) -> None:
        if not any(resolved.is_relative_to(root) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            raise AccessDeniedError(f"{field}: {text[:200]!r} is not under a folder that --model-root allows: {roots}")
