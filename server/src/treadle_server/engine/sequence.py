"""The mutable state of a request and of each of its choices while the engine works on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Final

from treadle_server.engine.backlog import Backlog
from treadle_server.engine.events import EngineEvent, Timings, TokenCounts
from treadle_server.engine.lane import Lane
from treadle_server.engine.request import GenerationRequest, LogprobsMode
from treadle_server.engine.weights import Weights
from treadle_server.model.kv_cache import KVCache
from treadle_server.model.rotary import angle_key

_LOG = logging.getLogger(__name__)

Deliver = Callable[[list[EngineEvent]], None]

# What one step of priority is worth: seconds of waiting.
PRIORITY_STEP_S: Final = 10.0


class ActiveRequest:
    """A request in the engine: where its events go and whether anyone still wants them.

    `cancel` may be called from any thread, `taken` from the reader's; everything else belongs to the engine thread.

    Attributes:
        weight_version: the weights that it begins and ends with. Their number alone: a reader may keep this object.
        backlog: what was delivered and not taken yet.
        rank_s: who goes first, the smallest. It never changes: a request of higher priority goes before those that came
            up to `PRIORITY_STEP_S` earlier for each step between them, and after all that came before that, so that
            nobody waits for ever for others that keep coming.
    """

    def __init__(
        self,
        request: GenerationRequest,
        deliver: Deliver,
        weight_version: int,
        backlog: Backlog,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Deliver to a reader; `wake` is called, from any thread, when the engine may have more or less to do."""
        self.request = request
        self.weight_version = weight_version
        self.backlog = backlog
        self.arrived_s = time.monotonic()
        self.rank_s = self.arrived_s - request.priority * PRIORITY_STEP_S
        self._deliver = deliver
        self._wake = wake
        self._cancelled = False
        self._cancelled_choices: set[int] = set()

    def cancel(self, index: int | None = None) -> None:
        """Ask the engine to drop the request, or one of its choices, before its next step."""
        if index is None:
            self._cancelled = True
        else:
            self._cancelled_choices.add(index)
        self._wake()

    def taken(self, events: Seq[EngineEvent]) -> None:
        """Note that the reader is done with events; a reader that does not say so gets no more of them in the end."""
        if self.backlog.take(events):
            self._wake()

    def is_cancelled(self, index: int) -> bool:
        """Tell whether nobody wants more of this choice."""
        return self._cancelled or index in self._cancelled_choices

    def deliver(self, events: list[EngineEvent]) -> None:
        """Hand events to the reader, unless it has gone; one that raises is gone from then on."""
        if not events or self._cancelled:
            return
        self.backlog.give(events)
        try:
            self._deliver(events)
        except Exception:  # noqa: BLE001 - whatever the reader does, the step goes on for the others
            _LOG.exception("request %s: its reader failed, so it is cancelled", self.request.request_id)
            self.cancel()


class Sequence(Lane):
    """One choice of a request: its tokens and cache, its sampling state, and the lane that guides it.

    Attributes:
        weights: what computes it, from its first token to its last.
        rank: who goes first, the smallest: by request, then by choice.
        guide: the negative prompt with the same output, where the request is guided; it is computed in step.
    """

    def __init__(
        self, active: ActiveRequest, index: int, weights: Weights, cache: KVCache, guide_cache: KVCache | None = None
    ) -> None:
        request = active.request
        super().__init__(request.prompt_ids, cache)
        self.active = active
        self.weights = weights
        self.request = request
        self.index = index
        self.rank = active.rank_s, index
        self.guide: Lane | None = None
        if request.guidance is not None and guide_cache is not None:
            self.guide = Lane(request.guidance.negative_ids, guide_cache)
        self.sampler = request.chain.begin(
            request.prompt_ids,
            seed=request.seed,
            choice=index,
            eos_ids=request.eos_ids,
            stop_ids=request.stop_ids,
            wants_processed=request.logprobs is LogprobsMode.PROCESSED,
        )
        self.num_scored = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def prefix_key(self, lane: Lane) -> Hashable:
        """Return whose keys and values the lane's are: all that they depend on beside the tokens."""
        angles = angle_key(self.weights.decoder.config.positions, len(lane.prompt_ids))
        return self.weights.version, self.request.adapter, angles

    def num_shareable(self, lane: Lane) -> int:
        """Return how many of the lane's first tokens have keys and values that belong to its key."""
        count = min(lane.cache.length, lane.num_tokens - (lane.num_drafted > 0))
        positions, num_prompt = self.weights.decoder.config.positions, len(lane.prompt_ids)
        if count > num_prompt and angle_key(positions, count) != angle_key(positions, num_prompt):
            return num_prompt
        return count

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What the model must see of it: itself, and its guide."""
        return (self,) if self.guide is None else (self, self.guide)

    @property
    def is_decoding(self) -> bool:
        """Whether a single token stands between it and its next one, in every lane."""
        return self.num_remaining == 1 and (self.guide is None or self.guide.num_remaining == 1)

    @property
    def is_paused(self) -> bool:
        """Whether its reader lags so far behind that no more is made for it now."""
        return self.active.backlog.is_full

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants more of it."""
        return self.active.is_cancelled(self.index)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are to be computed before it can decode."""
        return sum(lane.num_remaining for lane in self.lanes)

    @property
    def counts(self) -> TokenCounts:
        """Tokens that took less work than others."""
        return TokenCounts(self.num_cached_tokens, self.num_draft_tokens, self.num_accepted_tokens)

    def choose(self, token_id: int) -> bool:
        """Take the chosen token into every lane and all stages; tell if it was drafted. StageError if a stage fails."""
        was_drafted = self.drafted_next() == token_id
        self.num_accepted_tokens += was_drafted
        for lane in self.lanes:
            lane.append(token_id)
        self.sampler.accept(token_id)
        return was_drafted

    def begin_work(self) -> float | None:
        """Note the time of the first step, once; return how long the request had waited then, later None."""
        if self._started_s is not None:
            return None
        self._started_s = time.monotonic()
        return self._started_s - self.active.arrived_s

    def note_token(self) -> float | None:
        """Note the time of a token; return the seconds since the one before it, None for the first."""
        now, before = time.monotonic(), self._last_token_s
        self._last_token_s = now
        if before is None:
            self._first_token_s = now
            return None
        return now - before

    def timings(self) -> Timings:
        """Return the durations up to the newest token, or so far where there is none."""
        now = self._last_token_s or time.monotonic()
        started = self._started_s or now
        first = self._first_token_s or now
        return Timings(started - self.active.arrived_s, first - started, now - first)

    def fork(self, index: int, caches: Seq[KVCache]) -> Sequence:
        """Return a further choice of the same request at the end of the shared prefill, with a cache for each lane."""
        other = Sequence(self.active, index, self.weights, *caches)
        other._started_s = self._started_s
        return other
