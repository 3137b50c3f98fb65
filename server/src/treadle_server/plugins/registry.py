"""The sampler stages that requests can name, and the plain knobs the built-in ones have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treadle_plugin_api.contract import has_override
from treadle_plugin_api.random import stage_key
from treadle_plugin_api.sampling import Kind, Knob, Select, Stage

from treadle_server.errors import PluginError

StageClass = type[Stage] | type[Select]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """One registered stage class and where it came from.

    Attributes:
        cls: the class; its fields are the parameters.
        plugin: name of the plugin, as in `--no-plugin`.
        distribution: the installed distribution, or the file of a local plugin.
        version: the distribution's version; empty for a local plugin.
        built_in: whether it came with treadle; foreign stages are guarded after every call.
    """

    cls: StageClass
    plugin: str
    distribution: str
    version: str
    built_in: bool = False

    @property
    def name(self) -> str:
        """What requests call the stage."""
        return self.cls.name

    @property
    def kind(self) -> Kind:
        """Mask, penalty, transform, filter or select."""
        return self.cls.kind

    @property
    def doc(self) -> str:
        """First line of the class's own docstring."""
        return (inspect.cleandoc(vars(self.cls).get("__doc__") or "").splitlines() or [""])[0]

    def schema(self) -> dict[str, Any]:
        """JSON schema of the parameters."""
        return self.cls.model_json_schema()

    @property
    def is_select(self) -> bool:
        """Whether it chooses the token."""
        return issubclass(self.cls, Select)

    @property
    def is_batched(self) -> bool:
        """Whether its author gave it a way of its own to treat many rows at once."""
        return has_override(self.cls, "apply_batch")

    def key(self, occurrence: int = 0) -> int:
        """Key of its random stream in a chain that holds it for the `occurrence`-th time."""
        return stage_key(self.name, occurrence)


@dataclass(frozen=True, slots=True)
class KnobEntry:
    """One plain knob: a field of a built-in stage that requests set by its name alone.

    Attributes:
        name: name of the knob and of the field.
        entry: the stage that the knob belongs to.
        off: values that do not turn the stage on, the default first; empty if the knob only adjusts it.
    """

    name: str
    entry: StageEntry
    off: tuple[object, ...]

    @property
    def default(self) -> object:
        """Value of the knob in a request that does not set it."""
        if not self.off:
            return self.entry.cls.model_fields[self.name].get_default()
        return {} if self.off[0] == {} else self.off[0]  # a mapping of its own, which nobody shares

    def is_off(self, value: object) -> bool:
        """Whether `value` leaves the stage out."""
        return any(_is_same(value, off) for off in self.off)


def _is_same(value: object, off: object) -> bool:
    """Whether `value` is the off value `off`. True is not 1; 1 is as good as 1.0 where numbers are meant."""
    if isinstance(off, tuple | dict):
        return isinstance(value, (list, tuple) if isinstance(off, tuple) else Mapping) and not value
    return (type(value) is type(off) or (type(value) is int and type(off) is float)) and value == off


class StageRegistry:
    """Stage classes by name, in the order in which they were registered.

    `absent` says of names that are not there why they are not, where that is known.
    """

    def __init__(self, entries: Iterable[StageEntry] = (), absent: Mapping[str, str] | None = None) -> None:
        self._entries: dict[str, StageEntry] = {}
        self._absent = absent or {}
        for entry in entries:
            if entry.name in self._entries:
                raise PluginError(f"two stages are called {entry.name!r}")
            self._entries[entry.name] = entry
        self._knobs = {knob.name: knob for entry in self._entries.values() for knob in stage_knobs(entry)}

    def get(self, name: str) -> StageEntry:
        """The stage called `name`; raises KeyError with every known name if there is none."""
        try:
            return self._entries[name]
        except KeyError:
            known = self._absent.get(name) or f"known stages: {', '.join(self._entries)}"
            raise KeyError(f"there is no stage {name!r:.80}; {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entries(self) -> tuple[StageEntry, ...]:
        """Every registered stage."""
        return tuple(self._entries.values())

    @property
    def knobs(self) -> Mapping[str, KnobEntry]:
        """Every plain knob by its name."""
        return self._knobs

    @property
    def knob_names(self) -> tuple[str, ...]:
        """Names of the plain knobs."""
        return tuple(self._knobs)


def stage_knobs(entry: StageEntry) -> Iterator[KnobEntry]:
    """The plain knobs that a stage's fields declare."""
    for name, field in entry.cls.model_fields.items():
        for marker in field.metadata:
            if isinstance(marker, Knob):
                yield KnobEntry(name, entry, marker.off)
