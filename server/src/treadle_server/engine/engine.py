"""One model's engine. A step is three calls: schedule, forward, postprocess."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_plugin_api.backend import Batch

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
from treadle_server.engine.logprobs import prompt_logprobs, token_logprob
from treadle_server.engine.request import GenerationRequest, LogprobsMode
from treadle_server.engine.scheduler import EngineLimits, Scheduled, Scheduler
from treadle_server.engine.sequence import ActiveRequest, Deliver, Sequence
from treadle_server.engine.speculation import Drafter, DraftModel, PromptLookup, Speculation
from treadle_server.engine.stage_monitor import StageMonitor
from treadle_server.errors import EngineError, NonFiniteLogitsError, TreadleError
from treadle_server.model.decoder import Decoder
from treadle_server.model.kv_cache import KVCache

# Rows of logits made at once when a whole prompt is scored: 32 x 150k float32 are 20 MB, however long the prompt.
_SCORED_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    num_waiting_requests: int
    num_waiting_tokens: int
    num_running_sequences: int
    kv_cache_bytes: int
    max_kv_cache_bytes: int
    num_generated_tokens: int


class Engine:
    """Continuous batching over one decoder.

    `submit` may be called from any thread; `step` and `fail_all` belong to the engine thread.
    """

    def __init__(
        self, decoder: Decoder, limits: EngineLimits | None = None, draft_model: DraftModel | None = None
    ) -> None:
        self.decoder = decoder
        self._drafters: dict[Speculation, Drafter] = {Speculation.PROMPT_LOOKUP: PromptLookup()}
        self.draft_model = draft_model
        if draft_model is not None:
            self._drafters[Speculation.DRAFT_MODEL] = draft_model
        self.scheduler = Scheduler(limits or EngineLimits())
        self.num_generated_tokens = 0
        self.stage_monitor = StageMonitor(self.scheduler.limits.max_stage_s)
        self._buffers = BufferPool()
        self._outbox: dict[int, tuple[ActiveRequest, list[EngineEvent]]] = {}

    def submit(self, request: GenerationRequest, deliver: Deliver) -> ActiveRequest:
        """Queue a request; its events go to `deliver` on the engine thread, at most one call a step.

        Raises:
            QueueFullError: as many requests wait as may.
            UnavailableError: the engine takes no more requests.
        """
        active = ActiveRequest(request, deliver)
        self.scheduler.admit(self._with_draft_cache(Sequence(active, 0, *self._new_caches(request))))
        return active

    def _with_draft_cache(self, sequence: Sequence) -> Sequence:
        """Give a sequence a cache for the draft model where its request wants one, so that its memory is counted."""
        request = sequence.request
        if request.speculation is Speculation.DRAFT_MODEL and self.draft_model is not None:
            sequence.draft_cache = self.draft_model.new_cache(request.max_length)
            sequence.draft_room = request.max_draft_tokens
        return sequence

    def _new_caches(self, request: GenerationRequest) -> list[KVCache]:
        """Return an empty cache for each lane of a sequence."""
        lengths = [request.max_length]
        if request.guidance is not None:
            lengths.append(len(request.guidance.negative_ids) + request.max_tokens)
        return [self.decoder.new_cache(max_tokens=length) for length in lengths]

    def load(self) -> EngineLoad:
        """Return how busy the engine is; may be called from any thread, and is then a moment's view."""
        waiting, running = self.scheduler.waiting, list(self.scheduler.running)
        return EngineLoad(
            num_waiting_requests=len(waiting),
            num_waiting_tokens=sum(s.num_tokens for s in waiting),
            num_running_sequences=len(running),
            kv_cache_bytes=sum(lane.kv_bytes for s in running for lane in s.lanes),
            max_kv_cache_bytes=self.scheduler.limits.max_kv_bytes,
            num_generated_tokens=self.num_generated_tokens,
        )

    def step(self) -> bool:
        """Advance every running sequence; return whether there was anything to do."""
        plan = self.scheduler.schedule()
        if not plan:
            return False
        try:
            with np.errstate(all="ignore"):  # what is not finite is found in the logits, and fails its own request
                self._postprocess(plan, self._forward(plan))
                self._draft()
        except MemoryError:
            self._fail_sequences([item.sequence for item in plan], EngineError("the server ran out of memory"))
        self._flush()
        return True

    def _forward(self, plan: list[Scheduled]) -> npt.NDArray[np.floating]:
        """Run the model over the flat ragged batch of the plan; return hidden [tokens, dim]."""
        counts = [item.num_tokens for item in plan]
        batch = Batch(
            token_ids=np.concatenate([item.lane.next_ids(item.num_tokens) for item in plan]),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            prefix_lengths=np.array([item.lane.num_computed for item in plan], np.int64),
            prompt_lengths=np.array([len(item.lane.prompt_ids) for item in plan], np.int64),
        )
        for item in plan:
            item.sequence.begin_work()
        return self.decoder.forward(batch, [item.lane.cache for item in plan])

    def _postprocess(self, plan: list[Scheduled], hidden: npt.NDArray[np.floating]) -> None:
        """Score prompts where asked, and give every sequence that has seen all its tokens its next one."""
        ends = dict(zip((id(item.lane) for item in plan), np.cumsum([item.num_tokens for item in plan]), strict=True))
        for item in plan:
            if item.sequence.request.prompt_logprobs and item.sequence.index == 0 and item.lane is item.sequence:
                end = ends[id(item.lane)]
                self._score(item.sequence, hidden[end - item.num_tokens : end])
        ready = [item.sequence for item in plan if item.lane is item.sequence and item.lane.num_remaining <= 0]
        for sequence in ready:
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
            logits = self.decoder.head(hidden[start + skip : start + len(ids)])
            if not np.isfinite(logits.sum(dtype=np.float64)) and not _only_masked(logits):
                self._fail(sequence.active, NonFiniteLogitsError("the model's logits for the prompt are not finite"))
                return
            scored = prompt_logprobs(logits, ids[skip:], sequence.request.num_top_logprobs)
            sequence.num_scored += len(scored)
            self._emit(sequence, PromptScored(scored))

    def _sample(self, sequences: list[Sequence], hidden: npt.NDArray[np.floating], ends: dict[int, int]) -> None:
        """Choose the next token of each sequence, and further ones while they are the drafted ones.

        ends[id(lane)] is one past the lane's last row of hidden [tokens, dim].
        """
        counts = [1 + sequence.num_drafted for sequence in sequences]
        rows = [np.arange(ends[id(s)] - n, ends[id(s)]) for s, n in zip(sequences, counts, strict=True)]
        raw = self.decoder.head(hidden[np.concatenate(rows)])
        logits = self._guided(sequences, counts, raw, hidden, ends)
        first = np.cumsum([0, *counts[:-1]]).tolist()
        pending = [(choice, at) for s, at in zip(sequences, first, strict=True) for choice in self._choices_at(s)]
        while pending:
            wanted = [at for _, at in pending]
            picked = logits if wanted == list(range(len(logits))) else logits[wanted]
            samplers = [choice.sampler for choice, _ in pending]
            samples = sample_rows(samplers, picked, buffers=self._buffers, monitor=self.stage_monitor)
            taken = [self._take(c, sample, raw[at]) for (c, at), sample in zip(pending, samples, strict=True)]
            pending = [(choice, at + 1) for (choice, at), goes_on in zip(pending, taken, strict=True) if goes_on]
        for sequence in sequences:
            sequence.settle_draft()

    def _guided(
        self,
        sequences: list[Sequence],
        counts: list[int],
        raw: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating],
        ends: dict[int, int],
    ) -> npt.NDArray[np.floating]:
        """Return the rows to sample from: those of guided sequences turned away from their negative prompts."""
        guided = [(at, s) for at, s in zip(np.cumsum([0, *counts[:-1]]).tolist(), sequences, strict=True) if s.guide]
        if not guided:
            return raw
        negative = self.decoder.head(hidden[[ends[id(s.guide)] - 1 for _, s in guided]])
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
        drafted = choice.drafted_next()
        return self._advance(choice, sample, raw) and sample.token_id == drafted

    def _draft(self) -> None:
        """Draft what may come next on the sequences that want it, for the next step to confirm.

        Not before the first token of the answer: at the end of a shared prefill the caches are copied as they are.
        """
        decoding = [s for s in self.scheduler.running if s.is_decoding and s.num_output]
        decoding = self.scheduler.with_room_to_draft(decoding)
        for speculation, drafter in self._drafters.items():
            lanes = [s for s in decoding if s.request.speculation is speculation]
            counts = [min(s.request.max_draft_tokens, s.request.max_tokens - s.num_output - 1) for s in lanes]
            drafter.draft(lanes, counts)
            for lane in lanes:
                lane.num_draft_tokens += lane.num_drafted

    def _choices_at(self, sequence: Sequence) -> list[Sequence]:
        """Return the choices that sample from a sequence's row: itself; after a shared prefill the others too."""
        try:
            return [sequence, *self._fork_choices(sequence)]
        except TreadleError as error:
            self._fail(sequence.active, error)
            return []

    def _fork_choices(self, sequence: Sequence) -> list[Sequence]:
        """Make the other choices of a request whose shared prefill is complete."""
        if sequence.index != 0 or sequence.num_output or sequence.request.n == 1:
            return []
        forks = []
        for index in range(1, sequence.request.n):
            roomy = self.scheduler.has_room_for(sum(lane.kv_bytes for lane in sequence.lanes))
            copies = [lane.cache.fork() for lane in sequence.lanes] if roomy else self._new_caches(sequence.request)
            fork = self._with_draft_cache(sequence.fork(index, copies))
            self.scheduler.add_fork(fork)
            forks.append(fork)
        return forks

    def _advance(self, sequence: Sequence, sample: Sample, raw: npt.NDArray[np.floating]) -> bool:
        """Append a sampled token, tell the reader, and finish the sequence when it is its last; tell if it goes on."""
        token_id = sample.token_id
        logprob = _chosen_logprob(sequence.request, sample, raw)
        try:
            sequence.choose(token_id)
        except TreadleError as error:
            self._fail(sequence.active, error)
            return False
        sequence.note_token()
        self.num_generated_tokens += 1
        reason, matched = _finish_reason(sequence, token_id)
        timings, drafts = sequence.timings(), sequence.drafts
        self._emit(sequence, NewToken(sequence.index, token_id, matched is not None, logprob, timings, drafts))
        if reason is not None:
            self._finish(sequence, reason, matched)
        return reason is None

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: int | None) -> None:
        self._emit(sequence, ChoiceFinished(sequence.index, reason, matched, sequence.timings(), sequence.drafts))
        self.scheduler.remove([sequence])

    def _fail(self, active: ActiveRequest, error: TreadleError) -> None:
        """End a request with an error, all its choices with it."""
        if active.is_cancelled(-1):
            return
        mine = [s for s in self.scheduler.all() if s.active is active]
        self.scheduler.remove(mine)
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
