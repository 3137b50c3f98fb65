"""The mutable state of a request and of each of its choices while the engine works on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from treadle_server.engine.events import EngineEvent, Timings
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


class Sequence:
    """One choice of a request: its tokens, its cache and its sampling state.

    Attributes:
        token_ids: int64 [num_tokens], prompt and output.
        num_computed: how many of them have keys and values in the cache.
    """

    def __init__(self, active: ActiveRequest, index: int, cache: KVCache) -> None:
        request = active.request
        self.active = active
        self.request = request
        self.index = index
        self.cache = cache
        self.num_tokens = len(request.prompt_ids)
        self._buffer = np.concatenate([request.prompt_ids, np.zeros(16, np.int64)])
        self.sampler = request.chain.begin(
            request.prompt_ids,
            seed=request.seed,
            choice=index,
            eos_ids=request.eos_ids,
            stop_ids=request.stop_ids,
            wants_processed=request.logprobs is LogprobsMode.PROCESSED,
        )
        self.num_scored = 0
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def num_computed(self) -> int:
        """How many tokens have keys and values in the cache."""
        return self.cache.length

    @property
    def num_remaining(self) -> int:
        """How many tokens the model must still see before it can tell the next one."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return self.num_tokens - len(self.request.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether a single token stands between the sequence and its next one."""
        return self.num_remaining == 1

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants more of it."""
        return self.active.is_cancelled(self.index)

    def next_ids(self, count: int) -> npt.NDArray[np.int64]:
        """Return the next `count` tokens that the model has not seen, int64 [count]."""
        return self._buffer[self.num_computed : self.num_computed + count]

    def following_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the tokens after positions start..start+count, as far as they are known."""
        return self._buffer[start + 1 : min(start + 1 + count, self.num_tokens)]

    def append(self, token_id: int) -> None:
        """Add a generated token; the buffer doubles when it is full."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
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

    def fork(self, index: int, cache: KVCache) -> Sequence:
        """Return a further choice of the same request at the end of the shared prefill."""
        other = Sequence(self.active, index, cache)
        other._started_s = self._started_s
        return other
