"""How busy an engine is: a moment's view for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_server.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        num_running_sequences: those with memory.
        num_paused_sequences: those that wait for their readers.
        num_preempted_sequences: those that gave their memory back and wait for some.
        num_preemptions: how often one did, since the start.
        num_prefix_hit_tokens: tokens found in the prefix cache since the start, of `num_prefix_queried_tokens`.
    """

    num_waiting_requests: int
    num_waiting_tokens: int
    num_running_sequences: int
    num_paused_sequences: int
    num_preempted_sequences: int
    num_preemptions: int
    kv_cache_bytes: int
    max_kv_cache_bytes: int
    prefix_cache_bytes: int
    max_prefix_cache_bytes: int
    num_prefix_hit_tokens: int
    num_prefix_queried_tokens: int
    num_generated_tokens: int
    num_weight_versions: int

    @classmethod
    def of(cls, scheduler: Scheduler, weight_version: int, num_generated_tokens: int) -> EngineLoad:
        """Look at a scheduler, from any thread; `weight_version` is the one that new requests get."""
        waiting, returned, running = scheduler.queue.new, scheduler.queue.returned, list(scheduler.running)
        versions = {s.weights.version for s in (*running, *returned, *waiting)}
        return cls(
            num_waiting_requests=len(waiting),
            num_waiting_tokens=sum(s.num_tokens for s in waiting),
            num_running_sequences=len(running),
            num_paused_sequences=sum(s.is_paused for s in (*running, *returned)),
            num_preempted_sequences=len(returned),
            num_preemptions=scheduler.statistics.num_preemptions,
            kv_cache_bytes=sum(lane.kv_bytes for s in running for lane in s.lanes),
            max_kv_cache_bytes=scheduler.limits.max_kv_bytes,
            prefix_cache_bytes=scheduler.prefix_cache.num_bytes,
            max_prefix_cache_bytes=scheduler.limits.max_prefix_cache_bytes,
            num_prefix_hit_tokens=scheduler.prefix_cache.num_hit_tokens,
            num_prefix_queried_tokens=scheduler.prefix_cache.num_queried_tokens,
            num_generated_tokens=num_generated_tokens,
            num_weight_versions=len({weight_version, *versions}),
        )
