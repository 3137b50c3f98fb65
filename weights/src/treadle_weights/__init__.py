"""Models bundled with treadle as package data: Hugging Face folders whose `manifest.json` says how each was made."""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder", "names"]

_MANIFEST_FILE = "manifest.json"


def names() -> tuple[str, ...]:
    """Return the bundled models' names in alphabetical order."""
    return tuple(sorted(path.parent.name for path in _root().glob(f"*/{_MANIFEST_FILE}")))


def folder(name: str) -> Path:
    """Return the folder of a bundled model; raises KeyError, listing the names, when there is none of this name."""
    known = names()
    if name not in known:
        raise KeyError(f"no bundled model {name!r}; bundled: {', '.join(known) or 'none'}")
    return _root() / name


def _root() -> Path:
    return Path(__file__).parent
