"""What sequences are computed with: a version of the model's weights, and an adapter on top of it."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_plugin_api.backend import Adapter

from treadle_server.model.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Weights:
    """One version of a model's weights, ready to run; whoever holds it keeps it in memory.

    Attributes:
        version: counts up from 1 with each update.
        label: what people call the version; empty for none.
        num_parameters: number of parameters, tied ones counted once.
    """

    version: int
    decoder: Decoder
    num_parameters: int
    label: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter as it was loaded under its name; keys and values of another version are never those of this one.

    Attributes:
        version: counts up from 1 with each load under the name.
    """

    adapter: Adapter
    version: int

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.adapter.name

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""
        return max((len(delta.a) for delta in self.adapter.deltas.values()), default=0)


def deltas_of(loaded: LoadedAdapter | None) -> Adapter | None:
    """Return what a backend takes for a sequence; None for the bare model."""
    return None if loaded is None else loaded.adapter
