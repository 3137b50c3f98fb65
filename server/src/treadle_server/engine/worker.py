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
# A wait without end, such as a setting may ask for, is more than the library takes.
_LONGEST_IDLE_S = 3600.0


class EngineWorker:
    """Owns the one thread on which models run. Every method but `step` may be called from any thread."""

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
        engine.scheduler.queue.close()
        self.call(lambda: self._remove(engine)).result()

    def _remove(self, engine: Engine) -> None:
        engine.fail_all(UnavailableError("the model is being unloaded"))
        self._engines.remove(engine)

    def submit(self, engine: Engine, request: GenerationRequest, deliver: Deliver) -> ActiveRequest:
        """Queue a request; see Engine.submit. A cancelled request is dropped before the next step."""
        active = engine.submit(request, deliver, self._wake)
        self._wake()
        return active

    def _wake(self) -> None:
        """Let the thread look whether there is something to do: getting the command is what wakes it."""
        self._commands.put(_nothing)

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
            engine.scheduler.queue.close()
        self._commands.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        for engine in self._engines:
            engine.fail_all(UnavailableError("the server is shutting down"))
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            self._take_commands(0.0 if any(engine.scheduler.has_work for engine in self._engines) else self._idle_s())
            self.step()
        self._take_commands(0.0)  # whoever called meanwhile still gets an answer

    def _idle_s(self) -> float | None:
        """Return how long nothing is to be done at most: until a reader has lagged too long; None if none lags."""
        waits = [engine.scheduler.seconds_to_stall() for engine in self._engines]
        return min((min(wait_s, _LONGEST_IDLE_S) for wait_s in waits if wait_s is not None), default=None)

    def _take_commands(self, wait_s: float | None) -> None:
        """Run the commands that are there; wait so long for the first one, for ever if None."""
        try:
            self._commands.get(block=wait_s != 0.0, timeout=wait_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def step(self) -> None:
        """Step every engine once. On the engine thread only: for a long call, so that streams go on meanwhile."""
        # Not in `_run`: its variable would keep a removed engine, and all its weights, while the thread waits.
        for engine in self._engines:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        """Step an engine; a fault in it fails its requests and never ends the thread."""
        try:
            engine.step()
        except BaseException:  # noqa: BLE001 - a fault ends the requests of this engine, not the thread
            _LOG.exception("a step of the engine failed; its requests are ended")
            engine.fail_all(EngineError("the engine failed in this step; see the server's log"))


def _nothing() -> None:
    """Do nothing."""
