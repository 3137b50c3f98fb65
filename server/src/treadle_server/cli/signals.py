"""How a server's process is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType


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
