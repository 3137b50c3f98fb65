"""Changes of the served models while the server runs: loading, updating, unloading."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from treadle_server.checkpoints.store import ModelStore
from treadle_server.engine.weights import LoadedAdapter
from treadle_server.errors import InvalidRequestError, TreadleError
from treadle_server.language_model import LanguageModel
from treadle_server.language_model.validation import check_name
from treadle_server.service.off_loop import in_daemon_thread
from treadle_server.service.security.allowed_folders import AllowedFolders
from treadle_server.service.served_models import ServedModels

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

# How often an unloading model is asked whether its last request has ended.
_POLL_S = 0.02

LoadModel = Callable[[str, str], LanguageModel]


class ModelChanges:
    """Makes one change at a time to each model, and each to its end, whether its caller waits for it or not.

    Belongs to the event loop; what takes long runs in threads of its own, that end with the process.
    """

    def __init__(self, models: ServedModels, load: LoadModel, allowed: AllowedFolders, grace_s: float) -> None:
        """Keep the models, a function that loads one from a folder under a name, and the seconds that requests get."""
        self._models = models
        self._load = load
        self._allowed = allowed
        self._grace_s = grace_s
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()

    async def load_model(self, name: str, source: str) -> LanguageModel:
        """Load a folder or a stored model and serve it.

        Raises:
            ModelExistsError: the name is taken.
            TreadleError: the source cannot be had.
        """
        self._models.check_available()
        folder = await in_daemon_thread(partial(self._find_source, source))
        name = name or folder.name.lower()
        check_name("model", name)
        return await self._in_turn(name, partial(self._load_model, name, folder))

    async def _load_model(self, name: str, folder: Path) -> LanguageModel:
        self._models.check_free(name)
        model = await in_daemon_thread(partial(self._load, str(folder), name))
        self._models.add(model)
        _LOG.info("loaded model %s from %s", name, folder)
        return model

    def _find_source(self, source: str) -> Path:
        """Return the folder of an absolute path under a root, or of a stored or bundled model's name."""
        if Path(source).is_absolute():
            return self._allowed.find("source", source)
        if "/" in source or source.startswith("."):  # no name that a model can have
            message = f"must be an absolute path of a folder, or a stored model's name, got {source[:200]!r}"
            raise InvalidRequestError.of("source", message)
        return ModelStore().resolve_name(source)

    async def unload_model(self, name: str) -> None:
        """Refuse new requests of a model, let those under way finish for the grace period, and free it."""
        await self._in_turn(name, partial(self._unload_model, name))

    async def _unload_model(self, name: str) -> None:
        model = self._models.retire(name)
        try:
            end_s = time.monotonic() + self._grace_s
            while model.engine.scheduler.has_work and time.monotonic() < end_s:
                await asyncio.sleep(_POLL_S)
            await in_daemon_thread(model.close)
        finally:
            self._models.forget(name)
        _LOG.info("unloaded model %s", name)

    async def update_weights(self, name: str, path: str, label: str, expected_version: int | None) -> int:
        """Replace a model's weights; see LanguageModel.update_weights."""

        def update(model: LanguageModel) -> int:
            folder = self._allowed.find("path", path)
            version = model.update_weights(folder, label=label, expected_version=expected_version)
            _LOG.info("model %s: weight version %d, label %r, from %s", model.name, version, label, folder)
            return version

        return await self._change(name, update)

    async def load_adapter(self, name: str, adapter: str, path: str) -> LoadedAdapter:
        """Serve an adapter of a model; see LanguageModel.load_adapter."""
        return await self._change(name, lambda model: model.load_adapter(adapter, self._allowed.find("path", path)))

    async def unload_adapter(self, name: str, adapter: str) -> None:
        """Serve an adapter no more; see LanguageModel.unload_adapter."""
        await self._change(name, lambda model: model.unload_adapter(adapter))

    async def _change(self, name: str, change: Callable[[LanguageModel], _T]) -> _T:
        """Change a served model in a thread."""
        name = self._models.get(name).name

        async def changed() -> _T:
            model = self._models.get(name)  # it may have gone while this change waited for its turn
            return await in_daemon_thread(partial(change, model))

        return await self._in_turn(name, changed)

    async def _in_turn(self, name: str, change: Callable[[], Awaitable[_T]]) -> _T:
        """Run a change of a model after those before it; it goes on when its caller has gone."""
        turn = self._turns.setdefault(name, asyncio.Lock())

        async def run() -> _T:
            async with turn:
                return await change()

        task = asyncio.ensure_future(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_failure)
            raise

    def stop(self) -> None:
        """Give up what is under way: the server ends."""
        for task in self._running:
            task.cancel()


def _tell_failure(task: asyncio.Task[Any]) -> None:
    """Log why a change failed whose caller has gone: no other line would."""
    if not task.cancelled() and isinstance(task.exception(), TreadleError):
        _LOG.warning("a change of the models failed after its caller had gone: %s", task.exception())
