"""Between the event loop and the threads that check requests and run models."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from treadle_server.engine.events import EngineEvent
from treadle_server.engine.sequence import Deliver

_T = TypeVar("_T")

Inbox = asyncio.Queue[list[EngineEvent]]


async def run_off_loop(
    executor: Executor, function: Callable[[], _T], undo: Callable[[_T], object] | None = None
) -> _T:
    """Run a function in a thread of the executor; when the RPC ends meanwhile, `undo` gets what it returns."""
    inside = contextvars.copy_context()  # what the thread logs then names the request
    future = asyncio.get_running_loop().run_in_executor(executor, inside.run, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if undo is not None:
            future.add_done_callback(partial(_undo, undo))
        raise


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def in_daemon_thread(function: Callable[[], _T]) -> asyncio.Future[_T]:
    """Run a function in a thread of its own, that does not keep the process alive when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def resolve(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None is then what the function returned

    def run() -> None:
        try:
            outcome: tuple[_T | None, BaseException | None] = (function(), None)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
            outcome = (None, error)
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=run, name="treadle-loading", daemon=True).start()
    return future


class Deliveries:
    """Brings events from the engine thread to inboxes on an event loop, and wakes it once for all that wait.

    A step has events for every stream, and to wake a loop costs more than to put them all into their inboxes.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Inbox, list[EngineEvent]]] = deque()
        self._woken = False

    def to(self, inbox: Inbox) -> Deliver:
        """Return a function that puts events into an inbox of the running loop from another thread."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[EngineEvent]) -> None:
            self._waiting.append((inbox, events))
            if not self._woken:
                self._woken = True
                loop.call_soon_threadsafe(self._hand_out)

        return deliver

    def _hand_out(self) -> None:
        self._woken = False  # before it looks: what is appended from now on wakes the loop again
        while self._waiting:
            inbox, events = self._waiting.popleft()
            inbox.put_nowait(events)
