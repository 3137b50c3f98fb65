"""Where plugins come from: installed entry points of the group `treadle`, and files of a `--plugin-dir`."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from treadle_server.errors import PluginError

ENTRY_POINT_GROUP = "treadle"
BUILT_IN_DISTRIBUTION = "treadle-samplers"
# The losses and optimizers are in the server itself and come through the same door.
_BUILT_IN_DISTRIBUTIONS = (BUILT_IN_DISTRIBUTION, "treadle-server")


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that was found but not imported yet.

    Attributes:
        name: name of the entry point, or of the local file.
        distribution: the installed distribution, or the path of a local plugin.
        version: the distribution's version; empty for a local plugin.
        load: imports the plugin; may raise anything, as foreign code runs.
    """

    name: str
    distribution: str
    version: str
    load: Callable[[], object]

    @property
    def built_in(self) -> bool:
        """Whether it came with treadle."""
        return self.distribution in _BUILT_IN_DISTRIBUTIONS

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution}{f' {self.version}' if self.version else ''})"


def installed_sources() -> Iterator[PluginSource]:
    """Every entry point of the group, the built-in ones first, then by name so that no start differs from another."""
    found = metadata.entry_points(group=ENTRY_POINT_GROUP)
    sources = [
        PluginSource(entry.name, _canonical(entry.dist.name), entry.dist.version, entry.load)
        for entry in found
        if entry.dist is not None
    ]
    yield from sorted(sources, key=lambda source: (not source.built_in, source.name, source.distribution))


def local_sources(folders: Iterable[Path | str]) -> Iterator[PluginSource]:
    """Every `*.py` file and package in the folders; a path may also be one such file. PluginError for a missing one."""
    for folder in map(Path, folders):
        if not folder.exists():
            raise PluginError(f"--plugin-dir {str(folder)!r}: there is no such folder")
        for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
            file = path / "__init__.py" if path.is_dir() else path
            if file.is_file() and file.suffix == ".py" and not path.name.startswith(("_", ".")):
                yield PluginSource(path.stem, str(path), "", _FileLoader(path.stem, file.resolve()))


@dataclass(frozen=True, slots=True)
class _FileLoader:
    """Imports one file or package under a name that no installed module can have."""

    stem: str
    file: Path

    def __call__(self) -> object:
        name = f"treadle_local_{zlib.crc32(str(self.file).encode()):08x}_{self.stem}"
        is_package = self.file.name == "__init__.py"
        spec = importlib.util.spec_from_file_location(
            name, self.file, submodule_search_locations=[str(self.file.parent)] if is_package else None
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # pydantic looks annotations up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
