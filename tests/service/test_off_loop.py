"""From the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest
from treadle_server.engine.events import EngineEvent, PromptScored
from treadle_server.service.off_loop import Deliveries, Inbox

EVENTS: list[EngineEvent] = [PromptScored(()), PromptScored(())]


def test_events_of_a_step_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits when the loop looks is in its inbox then, in order, and later events wake it again."""

    async def run() -> None:
        deliveries, inboxes = Deliveries(), [Inbox() for _ in range(3)]
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_soon_threadsafe", wake := Mock(side_effect=loop.call_soon_threadsafe))
        delivers = [deliveries.to(inbox) for inbox in inboxes]
        for num_wakes in (1, 2):
            thread = threading.Thread(target=lambda: [deliver([event]) for event in EVENTS for deliver in delivers])
            thread.start()
            thread.join()
            assert wake.call_count == num_wakes
            assert [[(await inbox.get())[0] for _ in EVENTS] for inbox in inboxes] == [EVENTS] * 3

    asyncio.run(run())
