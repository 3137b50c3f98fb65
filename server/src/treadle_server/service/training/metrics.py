"""The figures of steps: a bounded history that any number of readers follow."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from treadle_server.training import LossResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The figures of one step; `time_s` is the Unix time at its end."""

    step: int
    loss: float
    num_tokens: int
    grad_norm: float
    lr: float
    tokens_per_s: float
    time_s: float = field(default_factory=time.time)


class BatchTally:
    """What the batches since the last step come to."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._num_tokens = 0
        self._loss = 0.0
        self._work_s = 0.0
        self._is_mean = True

    def add(self, result: LossResult, work_s: float) -> None:
        """Count a batch and the seconds it took."""
        self._is_mean = result.reduction == "mean"
        self._loss += result.loss * (result.num_tokens if self._is_mean else 1)
        self._num_tokens += result.num_tokens
        self.num_batches += 1
        self._work_s += work_s

    def metrics(self, *, step: int, grad_norm: float, lr: float, work_s: float) -> StepMetrics:
        """Return the figures of a step that took the batches and `work_s` seconds more."""
        return StepMetrics(
            step=step,
            loss=self._loss / (self._num_tokens if self._is_mean else 1),
            num_tokens=self._num_tokens,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_s=self._num_tokens / max(self._work_s + work_s, 1e-9),
        )


class MetricsLog:
    """Keeps the newest figures. Belongs to one event loop.

    Attributes:
        newest: the last figures, None before the first; may be read in any thread, and so the others.
        num_tokens: tokens of all steps that were added.
    """

    def __init__(self, max_kept: int) -> None:
        self._kept: deque[StepMetrics] = deque(maxlen=max_kept)
        self.newest: StepMetrics | None = None
        self.num_tokens = 0
        self._num_added = 0
        self._closed = False
        self._changed = asyncio.Event()

    def add(self, metrics: StepMetrics) -> None:
        """Add a step's figures; the oldest make room."""
        self._kept.append(metrics)
        self.newest = metrics
        self.num_tokens += metrics.num_tokens
        self._num_added += 1
        self._wake()

    @property
    def num_steps(self) -> int:
        """Steps that were added."""
        return self._num_added

    def close(self) -> None:
        """End all readers."""
        self._closed = True
        self._wake()

    async def follow(self, num_past: int | None, *, past_only: bool) -> AsyncIterator[StepMetrics]:
        """Yield what is kept, the `num_past` newest or all, then what comes. A slow reader skips what is gone."""
        at = self._num_added - len(self._kept) if num_past is None else self._num_added - num_past
        end = self._num_added if past_only else None
        while not self._closed and (end is None or at < end):
            first = self._num_added - len(self._kept)
            at = max(at, first)
            if at < self._num_added:
                at += 1
                yield self._kept[at - 1 - first]
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
