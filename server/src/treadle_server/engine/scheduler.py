"""Decides which sequences advance in a step, and makes room for what they add.

Prefill chunks and decode are one case: a sequence has tokens that the model has not seen, and gets a share of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from treadle_server.engine.lane import Lane
from treadle_server.engine.prefix_cache import PrefixCache
from treadle_server.engine.request_queue import RequestQueue
from treadle_server.engine.sequence import ActiveRequest, Sequence
from treadle_server.engine.shares import Scheduled, divide
from treadle_server.engine.statistics import EngineStatistics


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
        max_prefix_cache_bytes: memory for those of earlier texts, beside that; 0 keeps none.
        max_stage_s: seconds that a sampler stage may take for a row; slower calls are counted and logged.
        max_buffered_tokens: tokens, the likely ones listed beside them included, that may wait for the reader of a
            request before no more are made for it.
        max_stall_s: seconds that a reader may take nothing while so many wait, before its request is ended.
    """

    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    max_running: int = 64
    max_prefill_tokens: int = 256
    max_prefill_tokens_beside_decode: int = 64
    max_kv_bytes: int = 4 << 30
    max_prefix_cache_bytes: int = 512 << 20
    max_stage_s: float = 0.05
    max_buffered_tokens: int = 1024
    max_stall_s: float = 60.0


class Scheduler:
    """The queue of waiting sequences and those that hold memory. Belongs to the engine thread, but for the queue.

    Attributes:
        queue: sequences without memory: those of new requests and those that were put back.
        running: sequences with memory, those among them that wait for their readers included.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.prefix_cache = PrefixCache(limits.max_prefix_cache_bytes)
        self.statistics = EngineStatistics()
        self.queue = RequestQueue(limits.max_queued_requests, limits.max_queued_tokens)
        self.running: list[Sequence] = []
        self._starved: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.queue.first() is not None or any(not s.is_paused for s in self.running)

    def all(self) -> list[Sequence]:
        """Every sequence, waiting or running."""
        return [*self.running, *self.queue.returned, *self.queue.new]

    def ready(self) -> list[Sequence]:
        """The sequences that the next step can advance, in order of rank."""
        return sorted((s for s in self.running if not s.is_paused), key=_rank)[: self.limits.max_running]

    def stalled(self) -> list[ActiveRequest]:
        """The requests whose readers have taken nothing for longer than they may."""
        lagging = {id(s.active): s.active for s in self.all() if s.is_paused}
        return [active for active in lagging.values() if active.backlog.stalled_s > self.limits.max_stall_s]

    def seconds_to_stall(self) -> float | None:
        """Return how long it takes at least until a reader has lagged too long; None when none lags."""
        lagging = [s.active.backlog.stalled_s for s in self.all() if s.is_paused]
        return max(0.0, self.limits.max_stall_s - max(lagging)) if lagging else None

    def schedule(self) -> list[Scheduled]:
        """Return the sequences of the next step with their shares; memory suffices for what they add."""
        self.remove([s for s in self.all() if s.is_cancelled])
        self._start_waiting()
        limits = self.limits
        plan = divide(
            self.ready(),
            budget=limits.max_prefill_tokens,
            budget_beside_decode=limits.max_prefill_tokens_beside_decode,
        )
        return [item for item in self._make_room(plan) if self._reserve(item)]

    def take_starved(self) -> list[Sequence]:
        """Return, once, the sequences for which the machine had no memory."""
        starved, self._starved = self._starved, []
        return starved

    def _start_waiting(self) -> None:
        """Start what fits, by rank; the first that does not fit is waited for, so that no smaller one overtakes it."""
        while (sequence := self.queue.first()) is not None and len(self.ready()) < self.limits.max_running:
            if not self._make_room_for(sequence):
                return
            self.queue.start(sequence)
            self.running.append(sequence)
            self._recall(sequence)

    def _make_room_for(self, sequence: Sequence) -> bool:
        """Tell whether a sequence fits, once those that wait for their readers have given up what it needs."""
        needed = sum(lane.kv_bytes_after(lane.num_tokens) for lane in sequence.lanes)
        while self.running and self.kv_bytes() + needed > self.limits.max_kv_bytes:
            victim = self._last_running()
            if not victim.is_paused:
                return False
            self._put_back(victim)
        return True

    def _recall(self, sequence: Sequence) -> None:
        """Fill a sequence's caches as far as its beginning is known; one token at least is left to compute."""
        if sequence.request.prompt_logprobs and sequence.index == 0:
            return  # every token of the prompt is to be scored
        for lane in sequence.lanes:
            try:
                found = self.prefix_cache.load(sequence.prefix_key(lane), lane.ids[:-1], lane.cache)
            except MemoryError:
                self._starve(sequence)
                return
            if lane is sequence and not sequence.num_output:
                sequence.num_cached_tokens = found

    def remember(self, sequence: Sequence) -> None:
        """Keep a copy of what was computed of a sequence for prompts that begin like it."""
        try:
            for lane in sequence.lanes:
                ids = lane.ids[: sequence.num_shareable(lane)]
                self.prefix_cache.store(sequence.prefix_key(lane), ids, lane.cache)
        except MemoryError:
            self.prefix_cache.clear()  # the machine is short of it, and nobody needs the copies

    def _reserve(self, item: Scheduled) -> bool:
        """Get the memory of what a step adds to a lane; where the machine has none, that request alone fails."""
        for last_try in (False, True):
            try:
                item.lane.cache.make_room(item.num_tokens)
            except MemoryError:
                self.prefix_cache.clear()
                if last_try:
                    self._starve(item.sequence)
            else:
                return True
        return False

    def _starve(self, sequence: Sequence) -> None:
        self._starved.append(sequence)

    def _make_room(self, plan: list[Scheduled]) -> list[Scheduled]:
        """Put sequences back in line, the last of them first, while memory is short; they go on where they were."""
        while len(self.running) > 1 and self._bytes_after(plan) > self.limits.max_kv_bytes:
            victim = self._last_running()
            self._put_back(victim)
            plan = [item for item in plan if item.sequence is not victim]
        return plan

    def _last_running(self) -> Sequence:
        """Return who loses its memory first: one whose reader lags if there is one, then the last in rank."""
        return max(self.running, key=lambda s: (s.is_paused, s.rank))

    def _put_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.remember(sequence)
        for lane in sequence.lanes:
            lane.release()
        self.queue.put_back(sequence)
        self.statistics.num_preemptions += 1

    def _bytes_after(self, plan: list[Scheduled]) -> int:
        planned = {id(item.lane): item.num_tokens for item in plan}
        return sum(lane.kv_bytes_after(planned.get(id(lane), 0)) for lane in self._lanes())

    def has_room_for(self, num_bytes: int) -> bool:
        """Tell whether one more sequence whose cache takes `num_bytes` may run."""
        return len(self.ready()) < self.limits.max_running and self.kv_bytes() + num_bytes <= self.limits.max_kv_bytes

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
            self.queue.put_back(sequence)

    def remove(self, sequences: Iterable[Sequence], *, failed: bool = False) -> None:
        """Drop sequences that are finished, failed or cancelled; their memory is free afterwards."""
        gone = {id(s) for s in sequences}
        if not gone:
            return
        for sequence in [s for s in self.running if id(s) in gone]:
            if not failed:
                self.remember(sequence)
            for lane in sequence.lanes:
                lane.release()
        self.running = [s for s in self.running if id(s) not in gone]
        self.queue.drop(lambda sequence: id(sequence) in gone)

    def kv_bytes(self) -> int:
        """Memory of all keys and values held, in bytes."""
        return sum(lane.kv_bytes for lane in self._lanes())

    def _lanes(self) -> Iterator[Lane]:
        return (lane for sequence in self.running for lane in sequence.lanes)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
