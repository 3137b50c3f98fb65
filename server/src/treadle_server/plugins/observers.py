"""Tells plugins of the requests that start and finish, on a thread of its own, so that none can hold a request up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pluggy
from treadle_plugin_api.observers import RequestInfo, RequestResult

from treadle_server.plugins.foreign_code import reason_of

_LOG = logging.getLogger(__name__)

_STARTED, _FINISHED = "treadle_request_started", "treadle_request_finished"
# Events that may wait for slow observers: minutes of a busy server, a few megabytes.
_MAX_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class _Event:
    """Something to tell: the hook, and the name and value of its argument."""

    hook: str
    argument: str
    value: object


class Observers:
    """The observers of requests that plugins brought. `started` and `finished` may be called from any thread."""

    def __init__(self, hooks: pluggy.HookRelay) -> None:
        self._implementations = {hook: getattr(hooks, hook).get_hookimpls() for hook in (_STARTED, _FINISHED)}
        self._waiting: queue.Queue[_Event] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()

    def started(self, request: Callable[[], RequestInfo]) -> None:
        """Tell that a request was queued; `request` is only called if somebody wants to know."""
        if self._implementations[_STARTED]:
            self._tell(_Event(_STARTED, "request", request()))

    def finished(self, result: Callable[[], RequestResult]) -> None:
        """Tell that a request has ended; `result` is only called if somebody wants to know."""
        if self._implementations[_FINISHED]:
            self._tell(_Event(_FINISHED, "result", result()))

    def wait(self) -> None:
        """Return when everything told so far has been seen."""
        self._waiting.join()

    def _tell(self, event: _Event) -> None:
        self._start_thread()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._log_once("full", "observers of requests lag behind; requests go by unobserved")

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="treadle-observers", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            event = self._waiting.get()
            for implementation in self._implementations[event.hook]:
                self._call(implementation, event)
            self._waiting.task_done()

    def _call(self, implementation: pluggy.HookImpl, event: _Event) -> None:
        """Call one observer with the argument, if it takes it, as pluggy would: one by one, so that each is called."""
        arguments = [event.value for name in implementation.argnames if name == event.argument]
        try:
            implementation.function(*arguments)
        except BaseException as error:  # noqa: BLE001 - foreign code, on a thread that has no other purpose
            who = f"{event.hook} of plugin {implementation.plugin_name}"
            self._log_once(who, f"{who} raised {reason_of(error)}; that is logged once")

    def _log_once(self, key: str, message: str) -> None:
        with self._lock:
            if key in self._logged:
                return
            self._logged.add(key)
        _LOG.warning("%s", message)
