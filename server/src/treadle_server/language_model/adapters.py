"""The adapters of a model by name."""

from __future__ import annotations

import threading

from treadle_plugin_api.backend import Adapter

from treadle_server.engine.weights import LoadedAdapter
from treadle_server.errors import AdapterNotFoundError
from treadle_server.language_model.validation import refuse


class AdapterTable:
    """Adapters by name. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedAdapter] = {}
        # Kept when an adapter goes: a later one of the same name must not pass for it.
        self._versions: dict[str, int] = {}

    def put(self, adapter: Adapter) -> LoadedAdapter:
        """Serve an adapter under its name, in place of one that has it; requests under way keep theirs."""
        with self._lock:
            version = self._versions[adapter.name] = self._versions.get(adapter.name, 0) + 1
            loaded = self._loaded[adapter.name] = LoadedAdapter(adapter, version)
        return loaded

    def remove(self, name: str) -> None:
        """Serve an adapter no more; requests under way keep it.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        with self._lock:
            if self._loaded.pop(name, None) is None:
                raise AdapterNotFoundError(name, self._loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the adapter that a request names; None, the bare model, for an empty name.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if not name:
            return None
        with self._lock:
            loaded, known = self._loaded.get(name), ", ".join(sorted(self._loaded))
        if loaded is None:
            raise refuse("adapter", "adapter", value=name, known=known or "none")
        return loaded

    def all(self) -> tuple[LoadedAdapter, ...]:
        """Return every adapter, by name."""
        with self._lock:
            return tuple(self._loaded[name] for name in sorted(self._loaded))
