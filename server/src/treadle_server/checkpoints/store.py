"""Models on this machine: a folder each, complete or not there at all, found by name.

    <root>/models/<name>/       a Hugging Face folder and treadle.json, the manifest
    <root>/incoming/<token>/    a scratch folder of an install that runs; `<token>.lock` is held as long as it does

A model is built in a scratch folder, flushed to disk and renamed into place. An install that was killed leaves a
scratch folder whose lock is free; the next install removes it. A model that is replaced is renamed away before it is
deleted, so whoever has its files open keeps them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from treadle_server.checkpoints.adapter_config import CONFIG_NAME as ADAPTER_CONFIG
from treadle_server.checkpoints.config_file import read_json_object
from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.checkpoints.safetensors_io import SafetensorsFile
from treadle_server.errors import CheckpointError, ImportSourceError, ModelNotFoundError

MANIFEST_FILE = "treadle.json"
_PATH_STARTS = ("./", "../", "/")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]|\.(?!\.)){0,95}")
_HASH_BLOCK_BYTES = 1 << 20


class Manifest(BaseModel):
    """What is known of a stored model; `treadle.json` in its folder.

    Attributes:
        sha256: the digest of every other file, by name.
        tensor_dtype: how most of the numbers are stored, as safetensors spells it.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    source: str
    licence: str
    created: datetime
    treadle_version: str
    tensor_dtype: str
    num_parameters: int
    num_bytes: int
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store: where it is, and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """By what the model is found."""
        return self.manifest.name

    @property
    def source(self) -> str:
        """What it was pulled from."""
        return self.manifest.source

    @property
    def licence(self) -> str:
        """Its licence, or "unknown"."""
        return self.manifest.licence

    @property
    def num_bytes(self) -> int:
        """The size of its files."""
        return self.manifest.num_bytes


class ModelStore:
    """The models under one root: TREADLE_HOME, or the user's cache folder, unless another is given."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = _default_root() if root is None else root
        self._models = self.root / "models"
        self._incoming = self.root / "incoming"

    def list(self) -> list[StoredModel]:
        """Return the stored models by name; folders without a readable manifest are not models."""
        folders = sorted(self._models.iterdir()) if self._models.is_dir() else []
        return [model for folder in folders if (model := _read_model(folder)) is not None]

    def names(self) -> tuple[str, ...]:
        """Return every name that `resolve` knows, stored and bundled."""
        return tuple(sorted({model.name for model in self.list()} | set(_bundled_names())))

    def resolve(self, name_or_path: str) -> Path:
        """Return the folder of a path, a stored model or a bundled one, in this order; names ignore case.

        Raises ModelNotFoundError when there is none, CheckpointError when the path exists but is not such a folder.
        """
        path = _existing_path(name_or_path)
        if path is not None and (path / "config.json").is_file():
            return path
        try:
            return self.resolve_name(name_or_path)
        except ModelNotFoundError:
            if path is None and name_or_path.startswith(_PATH_STARTS):
                raise ModelNotFoundError(name_or_path, is_folder=True) from None
            if path is None:
                raise
        if (path / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"{path}: is a LoRA adapter: use --model {_base_of(path)} --adapter {path}")
        raise CheckpointError(
            f"{path}: is not a Hugging Face folder (it has no config.json); a GGUF file must be pulled first"
        )

    def resolve_name(self, name: str) -> Path:
        """Return the folder of a stored model or a bundled one; names ignore case, and a path is none.

        Raises ModelNotFoundError when there is none.
        """
        if _NAME.fullmatch(name.lower()):
            stored = _read_model(self._models / name.lower())
            folder = _bundled_folder(name.lower()) if stored is None else stored.folder
            if folder is not None:
                return folder
        raise ModelNotFoundError(name, self.names())

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Lend an empty folder on the store's disk; removed at the end, or by the next install if this is killed."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder = self._incoming / secrets.token_hex(8)
        try:
            with FileLock(_lock_path(folder)):
                folder.mkdir()
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            _lock_path(folder).unlink(missing_ok=True)

    def add(
        self, name: str, folder: Path, *, source: str, licence: str, progress: Progress | None = None
    ) -> StoredModel:
        """Move a Hugging Face folder out of a scratch folder into the store; of two at once, the later one stays."""
        name = check_name(name)
        manifest = _describe(name, folder, source=source, licence=licence, progress=progress)
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for path in folder.iterdir():
            _flush(path)
        _flush(folder)
        self._swap_in(folder, self._models / name)
        return StoredModel(self._models / name, manifest)

    def _swap_in(self, folder: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._swap_lock():
            if target.exists():
                target.rename(_retired(folder.parent))
            folder.rename(target)
            _flush(target.parent)

    def _swap_lock(self) -> FileLock:
        return FileLock(self.root / ".lock")

    def _sweep(self) -> None:
        """Remove the scratch folders of installs that died; a model that one had moved aside is put back."""
        for folder in self._incoming.iterdir():
            if not folder.is_dir():
                continue
            try:
                with FileLock(_lock_path(folder), blocking=False):
                    self._put_back(_retired(folder))
                    shutil.rmtree(folder, ignore_errors=True)
            except Timeout:
                continue  # its install still runs
            _lock_path(folder).unlink(missing_ok=True)

    def _put_back(self, retired: Path) -> None:
        with self._swap_lock():
            try:
                target = self._models / Manifest.model_validate_json((retired / MANIFEST_FILE).read_bytes()).name
            except (OSError, ValidationError):
                return
            if not target.exists():
                retired.rename(target)


def check_name(name: str) -> str:
    """Return the name in lower case; raises ImportSourceError unless it is fit for a folder's name on every system."""
    lowered = name.lower()
    if not _NAME.fullmatch(lowered):
        raise ImportSourceError(
            "model name: must be 1 to 96 letters, digits, '-', '_' and single '.', beginning with a letter or digit; "
            f"received {name!r}"
        )
    return lowered


def _default_root() -> Path:
    home = os.environ.get("TREADLE_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("treadle", appauthor=False)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _retired(scratch: Path) -> Path:
    """Where an install puts the model that it replaces."""
    return scratch / "retired"


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # what no path can be, such as a whole page of text or ~nobody
        return None


def _base_of(adapter: Path) -> str:
    """Return the model that an adapter is for, as its files name it; BASE where they do not."""
    try:
        base = read_json_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    except CheckpointError:
        return "BASE"
    return base if isinstance(base, str) and base else "BASE"


def _read_model(folder: Path) -> StoredModel | None:
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return StoredModel(folder, manifest) if manifest.name == folder.name else None


def _bundled_names() -> tuple[str, ...]:
    try:
        import treadle_weights
    except ImportError:  # the server runs without the bundled models
        return ()
    return treadle_weights.names()


def _bundled_folder(name: str) -> Path | None:
    if name not in _bundled_names():
        return None
    import treadle_weights

    return treadle_weights.folder(name)


def _describe(name: str, folder: Path, *, source: str, licence: str, progress: Progress | None) -> Manifest:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    num_bytes = sum(path.stat().st_size for path in paths)
    reporter = Reporter(progress, f"checking {name}", num_bytes)
    dtypes = _count_numbers(folder)
    return Manifest(
        name=name,
        source=source,
        licence=licence,
        created=datetime.now(UTC),
        treadle_version=metadata.version("treadle-server"),
        tensor_dtype=dtypes.most_common(1)[0][0],
        num_parameters=dtypes.total(),
        num_bytes=num_bytes,
        sha256={path.name: _digest(path, reporter) for path in paths},
    )


def _count_numbers(folder: Path) -> Counter[str]:
    """How many numbers of each type the safetensors files hold; raises CheckpointError for none, or a damaged file."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with closing(SafetensorsFile(path)) as file:
            for tensor in file.tensors.values():
                counts[tensor.dtype] += math.prod(tensor.shape)
    if not counts:
        raise CheckpointError(f"{folder}: holds no tensors")
    return counts


def _digest(path: Path, reporter: Reporter) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
            reporter.advance(len(block))
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Have a file or a folder's entries written to disk, where the system can do so for folders."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
