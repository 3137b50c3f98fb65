"""What plugins bring that is called by name: losses, optimizers and compute backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from treadle_plugin_api.backend_factory import BackendFactory
from treadle_plugin_api.loss import Loss
from treadle_plugin_api.optimizer import Optimizer

PartT = TypeVar("PartT", bound=Loss | Optimizer | BackendFactory)


@dataclass(frozen=True, slots=True)
class PartEntry(Generic[PartT]):
    """A registered loss, optimizer or compute backend and where it came from.

    Attributes:
        part: what was registered.
        plugin: name of the plugin, as in `--no-plugin`.
        distribution: the installed distribution, or the file of a local plugin.
        built_in: whether it came with treadle; what foreign ones do is checked on every call.
    """

    part: PartT
    plugin: str
    distribution: str
    built_in: bool = False

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.part.name

    @property
    def owner(self) -> str:
        """How an error names it."""
        kinds = {Loss: "loss", Optimizer: "optimizer", BackendFactory: "backend"}
        return f"{kinds[type(self.part)]} {self.name!r} of plugin {self.plugin!r} ({self.distribution})"


class PartRegistry(Generic[PartT]):
    """Losses, optimizers or compute backends, by name. `absent` says of names that are not there why, where known."""

    def __init__(self, entries: Iterable[PartEntry[PartT]], absent: Mapping[str, str]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._absent = absent

    def get(self, name: str) -> PartEntry[PartT]:
        """The entry called `name`; raises KeyError with what is known if there is none."""
        if name not in self._entries:
            reason = f"; {self._absent[name]}" if name in self._absent else ""
            known = ", ".join(self._entries) or "those of plugins, but none has any: install treadle-server anew"
            raise KeyError(f"must be one of {known}, but is {name!r:.80}{reason}")
        return self._entries[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in the order in which they were registered."""
        return tuple(self._entries)

    def parts(self) -> dict[str, PartT]:
        """What was registered, by name."""
        return {name: entry.part for name, entry in self._entries.items()}
