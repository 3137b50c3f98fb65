"""The mutable state of a request and of each of its choices while the engine works on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from treadle_server.engine.events import EngineEvent, Timings
from treadle_server.engine.lane import Lane
from treadle_server.engine.request import GenerationRequest, LogprobsMode
from treadle_server.model.kv_cache import KVCache

_LOG = logging.getLogger(__name__)

Deliver = Callable[[list[EngineEvent]], None]


class ActiveRequest:
    """A request in the engine: where its events go and whether anyone still wants them.

    `cancel` may be called from any thread; everything else belongs to the engine thread.
    """

    def __init__(self, request: GenerationRequest, deliver: Deliver) -> None:
        self.request = request
        self.arrived_s = time.monotonic()
        self.num_open_choices = request.n
        self._deliver = deliver
        self._cancelled = False
        self._cancelled_choices: set[int] = set()

    def cancel(self, index: int | None = None) -> None:
        """Ask the engine to drop the request, or one of its choices, before its next step."""
        if index is None:
            self._cancelled = True
        else:
            self._cancelled_choices.add(index)

    def is_cancelled(self, index: int) -> bool:
        """Tell whether nobody wants more of this choice."""
        return self._cancelled or index in self._cancelled_choices

    def deliver(self, events: list[EngineEvent]) -> None:
        """Hand events to the reader, unless it has gone; one that raises is gone from then on."""
        if not events or self._cancelled:
            return
        try:
            self._deliver(events)
        except Exception:  # noqa: BLE001 - whatever the reader does, the step goes on for the others
            _LOG.exception("request %s: its reader failed, so it is cancelled", self.request.request_id)
            self.cancel()


class Sequence(Lane):
    """One choice of a request: its tokens and cache, its sampling state, and the lane that guides it.

    Attributes:
        guide: the negative prompt with the same output, where the request is guided; it is computed in step.
    """

    def __init__(self, active: ActiveRequest, index: int, cache: KVCache, guide_cache: KVCache | None = None) -> None:
        request = active.request
        super().__init__(request.prompt_ids, cache)
        self.active = active
        self.request = request
        self.index = index
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
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What the model must see of it: itself, and its guide."""
        return (self,) if self.guide is None else (self, self.guide)

    @property
    def is_decoding(self) -> bool:
        """Whether a single token stands between it and its next one, in every lane."""
        return all(lane.num_remaining == 1 for lane in self.lanes)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants more of it."""
        return self.active.is_cancelled(self.index)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are to be computed before it can decode."""
        return sum(lane.num_remaining for lane in self.lanes)

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were the ones sampled."""
        return self.num_draft_tokens, self.num_accepted_tokens

    def choose(self, token_id: int) -> None:
        """Take the chosen token into every lane and tell the stages; StageError if one fails."""
        if self.drafted_next() == token_id:
            self.num_accepted_tokens += 1
        for lane in self.lanes:
            lane.append(token_id)
        self.sampler.accept(token_id)

    def begin_work(self) -> None:
        """Note the time of the first step, once."""
        if self._started_s is None:
            self._started_s = time.monotonic()

    def note_token(self) -> None:
        """Note the time of the first token, once."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()

    def timings(self) -> Timings:
        """Return the durations so far."""
        now = time.monotonic()
        started = self._started_s or now
        first = self._first_token_s or now
        return Timings(started - self.active.arrived_s, first - started, now - first)

    def fork(self, index: int, caches: Seq[KVCache]) -> Sequence:
        """Return a further choice of the same request at the end of the shared prefill, with a cache for each lane."""
        other = Sequence(self.active, index, *caches)
        other._started_s = self._started_s
        return other
