"""How a server's process is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


def first_signal() -> asyncio.Event:
    """Return what the first SIGTERM or SIGINT sets; a second one ends the process where it stands."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        loop.call_soon_threadsafe(event.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
    return event


async def run_unless(signalled: asyncio.Event, function: Callable[[], _T]) -> asyncio.Future[_T] | None:
    """Run a function in a thread and return the future, which has its result; None when a signal came first."""
    from treadle_server.service.off_loop import in_daemon_thread

    running = in_daemon_thread(function)
    waiting = asyncio.ensure_future(signalled.wait())
    awaited: list[asyncio.Future[Any]] = [running, waiting]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if signalled.is_set():
        running.cancel()
        return None
    return running
