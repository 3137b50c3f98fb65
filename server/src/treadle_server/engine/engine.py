"""One model's engine. A step is three calls: schedule, forward, postprocess."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from treadle_plugin_api.backend import Adapter, Batch
from treadle_plugin_api.drawing import draw

from treadle_server.engine.backlog import Backlog
from treadle_server.engine.chain import BufferPool, Sample, sample_rows
from treadle_server.engine.events import (
    ChoiceFinished,
    EngineEvent,
    FinishReason,
    NewToken,
    PromptScored,
    RequestFailed,
    TokenLogprob,
)
from treadle_server.engine.guidance import guided_logits
from treadle_server.engine.load import EngineLoad
from treadle_server.engine.logprobs import prompt_logprobs, token_logprob
from treadle_server.engine.prefix_cache import PrefixCache
from treadle_server.engine.request import GenerationRequest, LogprobsMode
from treadle_server.engine.scheduler import EngineLimits, Scheduler
from treadle_server.engine.sequence import ActiveRequest, Deliver, Sequence
from treadle_server.engine.shares import Scheduled
from treadle_server.engine.speculation import Drafter, DraftModel, PromptLookup, Speculation
from treadle_server.engine.stage_monitor import StageMonitor
from treadle_server.engine.weights import Weights, deltas_of
from treadle_server.errors import EngineError, NonFiniteLogitsError, SlowReaderError, TreadleError
from treadle_server.model.kv_cache import KVCache

# Rows of logits made at once when a whole prompt is scored: 32 x 150k float32 are 20 MB, however long the prompt.
_SCORED_ROWS = 32


class Engine:
    """Continuous batching over one model.

    `submit` may be called from any thread; `step`, `update` and `fail_all` belong to the engine thread.

    Attributes:
        weights: what new requests are computed with; those under way keep what they began with.
    """

    def __init__(
        self, weights: Weights, limits: EngineLimits | None = None, draft_model: DraftModel | None = None
    ) -> None:
        self.weights = weights
        self._drafters: dict[Speculation, Drafter] = {Speculation.PROMPT_LOOKUP: PromptLookup()}
        self.draft_model = draft_model
        if draft_model is not None:
            self._drafters[Speculation.DRAFT_MODEL] = draft_model
        self.scheduler = Scheduler(limits or EngineLimits())
        self.num_generated_tokens = 0
        self.stage_monitor = StageMonitor(self.scheduler.limits.max_stage_s)
        self.statistics = self.scheduler.statistics
        self._buffers = BufferPool()
        self._outbox: dict[int, tuple[ActiveRequest, list[EngineEvent]]] = {}

    def submit(
        self, request: GenerationRequest, deliver: Deliver, wake: Callable[[], None] = lambda: None
    ) -> ActiveRequest:
        """Queue a request; its events go to `deliver` on the engine thread, at most one call a step.

        `wake` is called when there may be something to do again after all readers lagged, or one has gone.

        Raises:
            QueueFullError: as many requests wait as may.
            UnavailableError: the engine takes no more requests.
        """
        weights = self.weights
        backlog = Backlog(self.scheduler.limits.max_buffered_tokens)
        active = ActiveRequest(request, deliver, weights.version, backlog, wake)
        sequence = Sequence(active, 0, weights, *_new_caches(request, weights))
        self.scheduler.queue.admit(self._with_draft_cache(sequence))
        return active

    def update(self, weights: Weights) -> None:
        """Compute later requests with other weights of the same model."""
        self.weights = weights
        self.prefix_cache.clear()

    def _with_draft_cache(self, sequence: Sequence) -> Sequence:
        """Give a sequence a cache for the draft model where its request wants one, so that its memory is counted."""
        request = sequence.request
        if request.speculation is Speculation.DRAFT_MODEL and self.draft_model is not None:
            sequence.draft_cache = self.draft_model.new_cache(request.max_length)
            sequence.draft_room = request.max_draft_tokens
        return sequence

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Return the memory of the keys and values of that many tokens, in bytes."""
        return self.weights.decoder.cache_bytes(num_tokens)

    @property
    def prefix_cache(self) -> PrefixCache:
        """Keys and values of earlier texts."""
        return self.scheduler.prefix_cache

    def load(self) -> EngineLoad:
        """Return how busy the engine is; may be called from any thread, and is then a moment's view."""
        return EngineLoad.of(self.scheduler, self.weights.version, self.num_generated_tokens)

    def step(self) -> bool:
        """Advance every running sequence; return whether there was anything to do."""
        plan = self._schedule()
        if not plan:
            return False
        try:
            with np.errstate(all="ignore"):  # what is not finite is found in the logits, and fails its own request
                parts = _by_weights(plan)
                for part, hidden in zip(parts, [self._forward(part) for part in parts], strict=True):
                    self._postprocess(part, hidden)
                self._draft()
        except MemoryError:
            self.prefix_cache.clear()
            self._fail_sequences([item.sequence for item in plan], EngineError("the server ran out of memory"))
        self._flush()
        return True

    def _schedule(self) -> list[Scheduled]:
        """Return the plan of the step, after ending the requests that can have no part in it."""
        limit_s = self.scheduler.limits.max_stall_s
        for active in self.scheduler.stalled():
            self._fail(active, SlowReaderError(f"the reader took nothing for {limit_s:g} s, the limit"))
        plan = self.scheduler.schedule()
        starved = self.scheduler.take_starved()
        self._fail_sequences(starved, EngineError("the server ran out of memory for keys and values"))
        return [item for item in plan if not item.sequence.is_cancelled]

    def _forward(self, plan: list[Scheduled]) -> npt.NDArray[np.floating]:
        """Run one version of the model over the flat ragged batch of its sequences; return hidden [tokens, dim]."""
        counts = [item.num_tokens for item in plan]
        batch = Batch(
            token_ids=np.concatenate([item.lane.next_ids(item.num_tokens) for item in plan]),
            starts=np.array([0, *accumulate(counts)], np.int64),
            prefix_lengths=np.array([item.lane.num_computed for item in plan], np.int64),
            prompt_lengths=np.array([len(item.lane.prompt_ids) for item in plan], np.int64),
            adapters=_adapters(plan),
        )
        for item in plan:
            waited_s = item.sequence.begin_work()
            if waited_s is not None:
                self.statistics.begun(len(item.sequence.request.prompt_ids), waited_s)
        with self.statistics.forward:
            return plan[0].sequence.weights.decoder.forward(batch, [item.lane.cache for item in plan])

    def _postprocess(self, plan: list[Scheduled], hidden: npt.NDArray[np.floating]) -> None:
        """Score prompts where asked, and give every sequence that has seen all its tokens its next one."""
        ends = dict(zip((id(item.lane) for item in plan), accumulate(item.num_tokens for item in plan), strict=True))
        for item in plan:
            if item.sequence.request.prompt_logprobs and item.sequence.index == 0 and item.lane is item.sequence:
                end = ends[id(item.lane)]
                self._score(item.sequence, hidden[end - item.num_tokens : end])
        ready = [item.sequence for item in plan if item.lane is item.sequence and item.lane.num_remaining <= 0]
        for sequence in ready:
            if not sequence.num_output:
                self.scheduler.remember(sequence)
            if sequence.request.max_tokens == 0:
                self._finish(sequence, FinishReason.MAX_TOKENS, None)
        open_ones = [sequence for sequence in ready if sequence.request.max_tokens > 0]
        if open_ones:
            self._sample(open_ones, hidden, ends)

    def _score(self, sequence: Sequence, hidden: npt.NDArray[np.floating]) -> None:
        """Send the log-probabilities of the prompt tokens that follow those just computed."""
        first = sequence.num_computed - len(hidden)
        if first == 0 and sequence.num_scored == 0:
            self._emit(sequence, PromptScored((TokenLogprob(int(sequence.request.prompt_ids[0]), None, None),)))
            sequence.num_scored = 1
        for start in range(0, len(hidden), _SCORED_ROWS):
            ids = sequence.request.prompt_ids[first + start + 1 : first + start + 1 + _SCORED_ROWS]
            ids = ids[: len(hidden) - start]
            skip = max(0, sequence.num_scored - (first + start + 1))  # already sent before a preemption
            if len(ids) <= skip:
                continue
            logits = sequence.weights.decoder.head(hidden[start + skip : start + len(ids)])
            if not np.isfinite(logits.sum(dtype=np.float64)) and not _only_masked(logits):
                self._fail(sequence.active, NonFiniteLogitsError("the model's logits for the prompt are not finite"))
                return
            scored = prompt_logprobs(logits, ids[skip:], sequence.request.num_top_logprobs)
            sequence.num_scored += len(scored)
            self._emit(sequence, PromptScored(scored))

    def _sample(self, sequences: list[Sequence], hidden: npt.NDArray[np.floating], ends: dict[int, int]) -> None:
        """Choose the next token of each sequence, and further ones while they are the drafted ones.

        All have the same weights. ends[id(lane)] is one past the lane's last row of hidden [tokens, dim].
        """
        counts = [1 + sequence.num_drafted for sequence in sequences]
        rows = [row for s, n in zip(sequences, counts, strict=True) for row in range(ends[id(s)] - n, ends[id(s)])]
        decoder = sequences[0].weights.decoder
        raw, drawer = decoder.head(hidden[rows]), decoder.backend.faster(draw)
        first = list(accumulate(counts[:-1], initial=0))
        logits = self._guided(sequences, first, raw, hidden, ends)
        pending = [(choice, at) for s, at in zip(sequences, first, strict=True) for choice in self._choices_at(s)]
        while pending:
            wanted = [at for _, at in pending]
            picked = logits if wanted == list(range(len(logits))) else logits[wanted]
            samplers = [choice.sampler for choice, _ in pending]
            with self.statistics.sampler:
                samples = sample_rows(
                    samplers, picked, buffers=self._buffers, monitor=self.stage_monitor, drawer=drawer
                )
            taken = [self._take(c, sample, raw[at]) for (c, at), sample in zip(pending, samples, strict=True)]
            pending = [(choice, at + 1) for (choice, at), goes_on in zip(pending, taken, strict=True) if goes_on]
        for sequence in sequences:
            if sequence.num_drafted:
                sequence.settle_draft()

    def _guided(
        self,
        sequences: list[Sequence],
        first: list[int],
        raw: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating],
        ends: dict[int, int],
    ) -> npt.NDArray[np.floating]:
        """Return the rows to sample from: those of guided sequences turned away from their negative prompts.

        first[i] is the first row of raw [rows, vocab] that belongs to sequences[i].
        """
        guided = [(at, s) for at, s in zip(first, sequences, strict=True) if s.guide]
        if not guided:
            return raw
        negative = sequences[0].weights.decoder.head(hidden[[ends[id(s.guide)] - 1 for _, s in guided]])
        logits = raw.copy()
        for (at, sequence), row in zip(guided, negative, strict=True):
            if sequence.request.guidance is not None:
                logits[at] = guided_logits(raw[at], row, sequence.request.guidance.scale)
        return logits

    def _take(self, choice: Sequence, sample: Sample | TreadleError, raw: npt.NDArray[np.floating]) -> bool:
        """Take one sample of a choice; return whether the next row is worth sampling: its drafted token came."""
        if isinstance(sample, TreadleError):
            self._fail(choice.active, sample)
            return False
        if choice.is_cancelled:
            return False
        logprob = _chosen_logprob(choice.request, sample, raw)
        try:
            was_drafted = choice.choose(sample.token_id)
        except TreadleError as error:
            self._fail(choice.active, error)
            return False
        self.statistics.num_accepted_tokens += was_drafted
        return self._advance(choice, sample.token_id, logprob) and was_drafted

    def _draft(self) -> None:
        """Draft what may come next on the sequences that want it, for the next step to confirm.

        Not before the first token of the answer: at the end of a shared prefill the caches are copied as they are.
        """
        if all(s.request.speculation is Speculation.NONE for s in self.scheduler.running):
            return
        decoding = [s for s in self.scheduler.ready() if s.is_decoding and s.num_output and not s.num_drafted]
        decoding = self.scheduler.with_room_to_draft(decoding)
        for speculation, drafter in self._drafters.items():
            lanes = [s for s in decoding if s.request.speculation is speculation]
            counts = [min(s.request.max_draft_tokens, s.request.max_tokens - s.num_output - 1) for s in lanes]
            drafter.draft(lanes, counts)
            for lane in lanes:
                lane.num_draft_tokens += lane.num_drafted
                self.statistics.num_draft_tokens += lane.num_drafted

    def _choices_at(self, sequence: Sequence) -> list[Sequence]:
        """Return the choices that sample from a sequence's row: itself; after a shared prefill the others too."""
        try:
            return [sequence, *self._fork_choices(sequence)]
        except TreadleError as error:
            self._fail(sequence.active, error)
        except MemoryError:
            self._fail(sequence.active, EngineError("the server ran out of memory for the choices of a request"))
        return []

    def _fork_choices(self, sequence: Sequence) -> list[Sequence]:
        """Make the other choices of a request whose shared prefill is complete."""
        if sequence.index != 0 or sequence.num_output or sequence.request.n == 1:
            return []
        forks = []
        for index in range(1, sequence.request.n):
            roomy = self.scheduler.has_room_for(sum(lane.kv_bytes for lane in sequence.lanes))
            caches = (lane.cache.fork() for lane in sequence.lanes)
            copies = caches if roomy else _new_caches(sequence.request, sequence.weights)
            fork = self._with_draft_cache(sequence.fork(index, list(copies)))
            self.scheduler.add_fork(fork)
            forks.append(fork)
        return forks

    def _advance(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Tell the reader of a token, and finish the sequence when it is its last; tell if it goes on."""
        gap_s = sequence.note_token()
        self.num_generated_tokens += 1
        reason, matched = _finish_reason(sequence, token_id)
        timings, counts = sequence.timings(), sequence.counts
        self.statistics.new_token(gap_s, timings.queue_s + timings.prefill_s, sequence.index)
        self._emit(sequence, NewToken(sequence.index, token_id, matched is not None, logprob, timings, counts))
        if reason is not None:
            self._finish(sequence, reason, matched)
        return reason is None

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: int | None) -> None:
        self._emit(sequence, ChoiceFinished(sequence.index, reason, matched, sequence.timings(), sequence.counts))
        self.scheduler.remove([sequence])

    def _fail(self, active: ActiveRequest, error: TreadleError) -> None:
        """End a request with an error, all its choices with it."""
        if active.is_cancelled(-1):
            return
        mine = [s for s in self.scheduler.all() if s.active is active]
        self.scheduler.remove(mine, failed=True)
        self._events_of(active).append(RequestFailed(error))
        self._flush_one(active)
        active.cancel()

    def _fail_sequences(self, sequences: list[Sequence], error: TreadleError) -> None:
        for active in {id(s.active): s.active for s in sequences}.values():
            self._fail(active, error)

    def fail_all(self, error: TreadleError) -> None:
        """End every request with an error."""
        self._fail_sequences(self.scheduler.all(), error)

    def _emit(self, sequence: Sequence, event: EngineEvent) -> None:
        self._events_of(sequence.active).append(event)

    def _events_of(self, active: ActiveRequest) -> list[EngineEvent]:
        return self._outbox.setdefault(id(active), (active, []))[1]

    def _flush_one(self, active: ActiveRequest) -> None:
        _, events = self._outbox.pop(id(active), (active, []))
        active.deliver(events)

    def _flush(self) -> None:
        """Deliver the events of the step, one call a request."""
        for active, _ in list(self._outbox.values()):
            self._flush_one(active)


def _new_caches(request: GenerationRequest, weights: Weights) -> list[KVCache]:
    """Return an empty cache for each lane of a sequence."""
    lengths = [request.max_length]
    if request.guidance is not None:
        lengths.append(len(request.guidance.negative_ids) + request.max_tokens)
    return [weights.decoder.new_cache(max_tokens=length) for length in lengths]


def _by_weights(plan: list[Scheduled]) -> list[list[Scheduled]]:
    """Divide a plan into the parts that one forward pass each can compute, oldest weights first."""
    parts: dict[int, list[Scheduled]] = {}
    for item in plan:
        parts.setdefault(item.sequence.weights.version, []).append(item)
    return [parts[version] for version in sorted(parts)]


def _adapters(plan: list[Scheduled]) -> tuple[Adapter | None, ...] | None:
    """Return the adapter of each sequence of a batch; None when nobody has one."""
    loaded = [item.sequence.request.adapter for item in plan]
    return tuple(map(deltas_of, loaded)) if any(loaded) else None


def _only_masked(logits: npt.NDArray[np.floating]) -> bool:
    """Tell whether the only values that are not finite are masked ones (-inf)."""
    return not bool(np.isnan(logits).any() or np.isposinf(logits).any())


def _chosen_logprob(request: GenerationRequest, sample: Sample, raw: npt.NDArray[np.floating]) -> TokenLogprob | None:
    if request.logprobs is LogprobsMode.NONE:
        return None
    logits = raw if request.logprobs is LogprobsMode.RAW or sample.processed is None else sample.processed
    return token_logprob(logits, sample.token_id, request.num_top_logprobs)


def _finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Tell whether the newest token ends the sequence, why, and which stop token matched."""
    request = sequence.request
    if sequence.num_output >= request.min_tokens:
        if token_id in request.eos_ids:
            return FinishReason.EOS, token_id
        if token_id in request.stop_ids:
            return FinishReason.STOP_TOKEN, token_id
    if sequence.num_output >= request.max_tokens:
        return (FinishReason.CONTEXT_FULL if request.truncated else FinishReason.MAX_TOKENS), None
    return None, None
