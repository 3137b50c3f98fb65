"""The engine thread: steps the engines of all models in turn."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from treadle_server.engine.engine import Engine
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.errors import EngineError, UnavailableError

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class EngineWorker:
    """Owns the one thread on which models run. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engines: list[Engine] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="treadle-engine", daemon=True)
        self._thread.start()

    def add(self, engine: Engine) -> None:
        """Step this engine from now on."""
        self._commands.put(lambda: self._engines.append(engine))

    def remove(self, engine: Engine) -> None:
        """Refuse new requests of this engine, fail those it has, and step it no more."""
        engine.scheduler.close()
        self.call(lambda: self._remove(engine)).result()

    def _remove(self, engine: Engine) -> None:
        engine.fail_all(UnavailableError("the model is being unloaded"))
        self._engines.remove(engine)

    def submit(self, engine: Engine, request: GenerationRequest, deliver: Deliver) -> ActiveRequest:
        """Queue a request; see Engine.submit. A cancelled request is dropped before the next step."""
        active = engine.submit(request, deliver)
        self._commands.put(_wake)
        return active

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the engine thread between two steps; a future cancelled before that runs nothing.

        Raises:
            UnavailableError: the worker is closed.
        """
        if self._stopping:
            raise UnavailableError("the engine is closed")
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is asked for
                future.set_exception(error)

        self._commands.put(run)
        return future

    def close(self) -> None:
        """Fail what is left and end the thread."""
        for engine in list(self._engines):
            engine.scheduler.close()
        self._commands.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        for engine in self._engines:
            engine.fail_all(UnavailableError("the server is shutting down"))
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            self._take_commands(block=not any(engine.scheduler.has_work for engine in self._engines))
            for engine in self._engines:
                self._step(engine)
        self._take_commands(block=False)  # whoever called meanwhile still gets an answer

    def _take_commands(self, *, block: bool) -> None:
        try:
            self._commands.get(block=block)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _step(self, engine: Engine) -> None:
        """Step an engine; a fault in it fails its requests and never ends the thread."""
        try:
            engine.step()
        except BaseException:  # noqa: BLE001 - a fault ends the requests of this engine, not the thread
            _LOG.exception("a step of the engine failed; its requests are ended")
            engine.fail_all(EngineError("the engine failed in this step; see the server's log"))


def _wake() -> None:
    """Do nothing: getting the command is what wakes the thread."""
