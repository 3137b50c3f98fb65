"""The queue keeps to rank and to its limits, and tells a refused request when to come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from treadle_server.engine.backlog import Backlog
from treadle_server.engine.events import NewToken, Timings, TokenCounts, TokenLogprob
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.request_queue import RequestQueue
from treadle_server.engine.sequence import PRIORITY_STEP_S, ActiveRequest
from treadle_server.errors import QueueFullError, UnavailableError


@dataclass(eq=False)
class Waiting:
    """What of a sequence the queue looks at."""

    name: str
    rank: tuple[float, int]
    num_tokens: int = 10
    is_paused: bool = False


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the clock, to be changed."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def ranked(now: list[float], name: str, priority: int = 0, after_s: float = 0.0) -> Any:
    """A sequence that comes `after_s` later than the one before, with the rank that its priority gives it."""
    now[0] += after_s
    request = GenerationRequest(
        request_id=name,
        prompt_ids=None,
        chain=None,
        seed=0,
        max_tokens=1,
        priority=priority,  # type: ignore[arg-type]
    )
    active = ActiveRequest(request, lambda events: None, 1, Backlog(1))
    return Waiting(name, (active.rank_s, 0))


def order(queue: RequestQueue) -> list[str]:
    """Start everything; return the names in the order in which they came out."""
    names = []
    while (sequence := queue.first()) is not None:
        queue.start(sequence)
        names.append(sequence.name)  # type: ignore[attr-defined]
    return names


def test_equals_leave_in_the_order_they_came(now: list[float]) -> None:
    """First come, first served, also at the same moment."""
    queue = RequestQueue(10, 1000)
    for name in "abc":
        queue.admit(ranked(now, name))
    queue.admit(ranked(now, "d", after_s=1))
    assert order(queue) == ["a", "b", "c", "d"]


def test_higher_priority_goes_first_but_not_before_those_that_have_waited_long(now: list[float]) -> None:
    """A step of priority is worth ten seconds of waiting: nobody waits for ever for others that keep coming."""
    queue = RequestQueue(100, 10_000)
    queue.admit(ranked(now, "low"))
    for number in range(5):
        queue.admit(ranked(now, f"high {number}", priority=2, after_s=PRIORITY_STEP_S * 0.6))
    assert order(queue) == ["high 0", "high 1", "high 2", "low", "high 3", "high 4"]


def test_those_put_back_keep_their_rank_and_count_for_no_limit(now: list[float]) -> None:
    """One that lost its memory goes before those that came after it, and takes no place from new requests."""
    queue = RequestQueue(1, 1000)
    first, second = ranked(now, "first"), ranked(now, "second", after_s=1)
    queue.put_back(first)
    queue.admit(second)
    assert order(queue) == ["first", "second"]


def test_one_whose_reader_lags_is_passed_over(now: list[float]) -> None:
    """It starts again when its reader has caught up."""
    queue = RequestQueue(10, 1000)
    first, second = ranked(now, "first"), ranked(now, "second", after_s=1)
    first.is_paused = True
    queue.put_back(first)
    queue.admit(second)
    assert order(queue) == ["second"]
    first.is_paused = False
    assert order(queue) == ["first"]


def test_limits_hold_for_requests_and_for_tokens(now: list[float]) -> None:
    """The first request is taken however long it is: nothing is ahead of it."""
    queue = RequestQueue(2, 15)
    queue.admit(Waiting("long", (0.0, 0), num_tokens=100))  # type: ignore[arg-type]
    with pytest.raises(QueueFullError, match="100 prompt tokens are waiting; the limit is 15"):
        queue.admit(ranked(now, "short"))
    queue = RequestQueue(2, 1000)
    queue.admit(ranked(now, "a"))
    queue.admit(ranked(now, "b"))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        queue.admit(ranked(now, "c"))
    queue.close()
    with pytest.raises(UnavailableError):
        queue.admit(ranked(now, "d"))


def refused_s(queue: RequestQueue, sequence: Any) -> float:
    """Return when a refused request is told to come back."""
    with pytest.raises(QueueFullError) as caught:
        queue.admit(sequence)
    return caught.value.retry_after_s


def test_retry_times_are_those_measured(now: list[float]) -> None:
    """One place becomes free every 3 s: the first refused is told 3 s, the second refused meanwhile 6 s."""
    queue = RequestQueue(4, 10_000)
    for name in "abcd":
        queue.admit(ranked(now, name))
    assert refused_s(queue, ranked(now, "x")) == 1.0  # nothing is known yet
    for _ in range(2):
        now[0] += 3
        first = queue.first()
        assert first is not None
        queue.start(first)
    for name in "ef":
        queue.admit(ranked(now, name))
    assert [refused_s(queue, ranked(now, "x")) for _ in range(3)] == [3.0, 6.0, 9.0]
    now[0] += 20  # nothing has started since: the queue is stuck
    assert refused_s(queue, ranked(now, "x")) == 60.0


def test_retry_times_count_the_tokens_ahead(now: list[float]) -> None:
    """100 tokens leave in 5 s: room for 50 more than fit takes 2.5 s."""
    queue = RequestQueue(100, 200)
    for name in "ab":
        queue.admit(Waiting(name, (0.0, 0), num_tokens=100))  # type: ignore[arg-type]
    now[0] += 0.5
    first = queue.first()
    assert first is not None
    queue.start(first)
    queue.admit(Waiting("c", (1.0, 0), num_tokens=100))  # type: ignore[arg-type]
    assert refused_s(queue, Waiting("d", (2.0, 0), num_tokens=500)) == pytest.approx(2.5)


def token(num_top: int = 0) -> NewToken:
    """A token with so many likely ones listed."""
    logprob = TokenLogprob(1, -1.0, 1, ((1, -1.0),) * num_top)
    return NewToken(0, 1, False, logprob, Timings(0, 0, 0), TokenCounts())


def test_a_backlog_counts_tokens_and_the_likely_ones_listed(now: list[float]) -> None:
    """It is full at its limit, says for how long, and tells the taking that ends that."""
    backlog = Backlog(6)
    backlog.give([token(num_top=3)])
    assert not backlog.is_full
    now[0] += 5
    backlog.give([token(), token()])
    assert backlog.is_full
    now[0] += 2
    assert backlog.stalled_s == 2
    assert backlog.take([token()])
    assert (backlog.is_full, backlog.stalled_s) == (False, 0.0)
    assert not backlog.take([token()])


def test_taking_too_little_leaves_a_backlog_full_but_not_stalled(now: list[float]) -> None:
    """A reader that is slow and not gone is waited for."""
    backlog = Backlog(1)
    backlog.give([token(), token(), token()])
    now[0] += 50
    assert not backlog.take([token()])
    assert (backlog.is_full, backlog.stalled_s) == (True, 0.0)
