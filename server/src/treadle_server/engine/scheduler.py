"""Decides which sequences advance in a step, and by how many tokens.

Prefill chunks and decode are one case: a sequence has tokens that the model has not seen, and gets a share of the step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from treadle_server.engine.lane import Lane
from treadle_server.engine.sequence import Sequence
from treadle_server.errors import QueueFullError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine may hold and do at once.

    Attributes:
        max_queued_requests: requests that wait for their first step.
        max_queued_tokens: prompt tokens of those requests.
        max_running: sequences that share a step.
        max_prefill_tokens: prompt tokens of a step when no sequence is decoding.
        max_prefill_tokens_beside_decode: the same while others stream: it bounds how long their next token takes.
        max_kv_bytes: memory for keys and values, in bytes.
        max_stage_s: seconds that a sampler stage may take for a row; slower calls are counted and logged.
    """

    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    max_running: int = 64
    max_prefill_tokens: int = 256
    max_prefill_tokens_beside_decode: int = 64
    max_kv_bytes: int = 4 << 30
    max_stage_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A lane of a sequence and the number of its tokens that the next step computes, drafted ones included."""

    sequence: Sequence
    lane: Lane
    num_tokens: int


def _decode(sequence: Sequence) -> list[Scheduled]:
    return [Scheduled(sequence, lane, 1 + lane.num_drafted) for lane in sequence.lanes]


def _prefill(sequence: Sequence, budget: int) -> list[Scheduled]:
    """Divide a budget over the lanes of a sequence. With several, each stops one token short: they decode together."""
    lanes = sequence.lanes
    items = []
    for position, lane in enumerate(lanes):
        wanted = lane.num_remaining - (len(lanes) > 1)
        share = min(wanted, budget // (len(lanes) - position))
        budget -= share
        items.append(Scheduled(sequence, lane, share))
    return [item for item in items if item.num_tokens]


class Scheduler:
    """The queue of waiting sequences and the set of running ones.

    `admit` may be called from any thread; everything else belongs to the engine thread.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._preempted: deque[Sequence] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def admit(self, sequence: Sequence) -> None:
        """Queue the first sequence of a request.

        Raises:
            QueueFullError: the queue holds as many requests or prompt tokens as it may.
            UnavailableError: the engine takes no more requests.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is shutting down and takes no new requests")
            self._check_room(sequence)
            self._waiting.append(sequence)

    def _check_room(self, sequence: Sequence) -> None:
        tokens = sum(s.num_tokens for s in self._waiting)
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, the limit", self._retry_after_s())
        if self._waiting and tokens + sequence.num_tokens > self.limits.max_queued_tokens:
            limit = self.limits.max_queued_tokens
            raise QueueFullError(f"{tokens} prompt tokens are waiting; the limit is {limit}", self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Guess when a place is free: the longer the queue, the later."""
        return min(1.0 + 0.1 * len(self._waiting), 30.0)

    def close(self) -> None:
        """Refuse every later request."""
        with self._lock:
            self._closed = True

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait for their first step."""
        with self._lock:
            return list(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self._preempted or self._waiting)

    def all(self) -> list[Sequence]:
        """Every sequence, waiting or running."""
        return [*self.running, *self._preempted, *self.waiting]

    def schedule(self) -> list[Scheduled]:
        """Return the sequences of the next step with their shares; memory suffices for what they add."""
        self.remove([s for s in self.all() if s.is_cancelled])
        self._start_waiting()
        shares = self._share()
        return self._make_room(shares)

    def _start_waiting(self) -> None:
        while len(self.running) < self.limits.max_running:
            sequence = self._next_waiting()
            if sequence is None:
                return
            self.running.append(sequence)

    def _next_waiting(self) -> Sequence | None:
        """Take the next sequence that should start: preempted ones first, and none while memory is short."""
        held = self.kv_bytes()
        with self._lock:
            queue = self._preempted or self._waiting
            if not queue:
                return None
            first = queue[0]
            needed = sum(lane.kv_bytes_after(lane.num_tokens) for lane in first.lanes)
            if self.running and held + needed > self.limits.max_kv_bytes:
                return None
            return queue.popleft()

    def _share(self) -> list[Scheduled]:
        """Give each decoding sequence its token and its drafts, and divide the prefill budget among the others."""
        prefilling = [s for s in self.running if not s.is_decoding]
        beside_decode = len(prefilling) < len(self.running)
        limits = self.limits
        budget = limits.max_prefill_tokens_beside_decode if beside_decode else limits.max_prefill_tokens
        shares: dict[int, list[Scheduled]] = {}
        for position, sequence in enumerate(sorted(prefilling, key=lambda s: s.num_prefill_tokens)):
            items = _prefill(sequence, budget // (len(prefilling) - position))
            budget -= sum(item.num_tokens for item in items)
            shares[id(sequence)] = items
        return [item for s in self.running for item in (shares[id(s)] if id(s) in shares else _decode(s))]

    def _make_room(self, plan: list[Scheduled]) -> list[Scheduled]:
        """Put the youngest sequences back in line while memory is short; they start over later, where they were."""
        while len(self.running) > 1 and self._bytes_after(plan) > self.limits.max_kv_bytes:
            victim = self.running.pop()
            for lane in victim.lanes:
                lane.release()
            self._preempted.appendleft(victim)
            plan = [item for item in plan if item.sequence is not victim]
        return plan

    def _bytes_after(self, plan: list[Scheduled]) -> int:
        planned = {id(item.lane): item.num_tokens for item in plan}
        return sum(lane.kv_bytes_after(planned.get(id(lane), 0)) for s in self.running for lane in s.lanes)

    def has_room_for(self, num_bytes: int) -> bool:
        """Tell whether one more sequence whose cache takes `num_bytes` may run."""
        return len(self.running) < self.limits.max_running and self.kv_bytes() + num_bytes <= self.limits.max_kv_bytes

    def with_room_to_draft(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return those for which memory suffices to draft; the plan of the step did not know the choices it made."""
        room = self.limits.max_kv_bytes - self.kv_bytes()
        chosen = []
        for sequence in sequences:
            held = 0 if sequence.draft_cache is None else sequence.draft_cache.num_bytes
            more = sequence.draft_bytes_after(0) - held
            if more <= room:
                room -= more
                chosen.append(sequence)
        return chosen

    def add_fork(self, sequence: Sequence) -> None:
        """Add a choice made from a running one: it runs on if its cache was copied, else it waits its turn."""
        if sequence.num_computed:
            self.running.append(sequence)
        else:
            self._preempted.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that are finished, failed or cancelled; their memory is free afterwards."""
        gone = {id(s) for s in sequences}
        if not gone:
            return
        for sequence in self.running:
            for lane in sequence.lanes if id(sequence) in gone else ():
                lane.release()
        self.running = [s for s in self.running if id(s) not in gone]
        with self._lock:
            self._waiting = deque(s for s in self._waiting if id(s) not in gone)
            self._preempted = deque(s for s in self._preempted if id(s) not in gone)

    def kv_bytes(self) -> int:
        """Memory of all keys and values held, in bytes."""
        return sum(lane.kv_bytes for s in self.running for lane in s.lanes)
