"""What an engine has done since it was made: counts and durations, kept so cheaply that every token can afford it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

# Waiting and prefill take from a millisecond to minutes, the time between two tokens less.
WAIT_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class DurationHistogram:
    """Counts durations by size. One thread adds; any other may look, and sees a moment's view.

    Attributes:
        bounds_s: the largest duration of each bucket, in seconds; one more bucket takes what is longer.
        sum_s: all durations together.
    """

    __slots__ = ("_counts", "bounds_s", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.sum_s = 0.0
        self._counts = [0] * (len(self.bounds_s) + 1)

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[int]:
        """Return how many durations were within each bound; the last number counts all."""
        return list(accumulate(self._counts))


class Stopwatch:
    """Adds up the seconds that blocks take, and how many there were."""

    __slots__ = ("_started_s", "num_runs", "total_s")

    def __init__(self) -> None:
        self.num_runs = 0
        self.total_s = 0.0
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._started_s
        self.num_runs += 1


class EngineStatistics:
    """Belongs to the engine thread; other threads may read.

    Attributes:
        num_preemptions: how often a sequence lost its memory and was put back in line.
        num_prompt_tokens: prompt tokens of the requests that have begun.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: those of them that were the ones sampled.
        forward: runs of the model.
        sampler: runs of the sampling chains of a step.
        queue: from arrival to the first step of each request.
        first_token: from arrival to the first token of each request.
        inter_token: from each token of a choice to its next one.
    """

    __slots__ = (
        "first_token",
        "forward",
        "inter_token",
        "num_accepted_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "queue",
        "sampler",
    )

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.forward = Stopwatch()
        self.sampler = Stopwatch()
        self.queue = DurationHistogram(WAIT_BOUNDS_S)
        self.first_token = DurationHistogram(WAIT_BOUNDS_S)
        self.inter_token = DurationHistogram(TOKEN_BOUNDS_S)

    def begun(self, num_prompt_tokens: int, queue_s: float) -> None:
        """Count a request at its first step."""
        self.num_prompt_tokens += num_prompt_tokens
        self.queue.add(queue_s)

    def new_token(self, gap_s: float | None, since_arrival_s: float, index: int) -> None:
        """Count a token: the gap to the one before it; of the first one the time since the request came, once."""
        if gap_s is not None:
            self.inter_token.add(gap_s)
        elif index == 0:
            self.first_token.add(since_arrival_s)
