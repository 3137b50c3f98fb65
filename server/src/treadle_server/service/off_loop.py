"""Between the event loop and the threads that check requests and run models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from treadle_server.engine.events import EngineEvent

_T = TypeVar("_T")

Inbox = asyncio.Queue[list[EngineEvent]]


async def run_off_loop(
    executor: Executor, function: Callable[[], _T], undo: Callable[[_T], object] | None = None
) -> _T:
    """Run a function in a thread of the executor; when the RPC ends meanwhile, `undo` gets what it returns."""
    future = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if undo is not None:
            future.add_done_callback(partial(_undo, undo))
        raise


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def deliver_to(inbox: Inbox) -> Callable[[list[EngineEvent]], None]:
    """Return a function that puts events into the inbox from another thread."""
    loop = asyncio.get_running_loop()

    def deliver(events: list[EngineEvent]) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, events)

    return deliver
