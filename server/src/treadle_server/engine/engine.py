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
from treadle_server.engine.logprobs import prompt_logprobs, token_logprob
from treadle_server.engine.request import GenerationRequest, LogprobsMode
from treadle_server.engine.scheduler import EngineLimits, Scheduled, Scheduler
from treadle_server.engine.sequence import ActiveRequest, Deliver, Sequence
from treadle_server.errors import EngineError, NonFiniteLogitsError, TreadleError
from treadle_server.model.decoder import Decoder

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

    def __init__(self, decoder: Decoder, limits: EngineLimits | None = None) -> None:
        self.decoder = decoder
        self.scheduler = Scheduler(limits or EngineLimits())
        self.num_generated_tokens = 0
        self._buffers = BufferPool()
        self._outbox: dict[int, tuple[ActiveRequest, list[EngineEvent]]] = {}

    def submit(self, request: GenerationRequest, deliver: Deliver) -> ActiveRequest:
        """Queue a request; its events go to `deliver` on the engine thread, at most one call a step.

        Raises:
            QueueFullError: as many requests wait as may.
            UnavailableError: the engine takes no more requests.
        """
        active = ActiveRequest(request, deliver)
        self.scheduler.admit(Sequence(active, 0, self.decoder.new_cache()))
        return active

    def load(self) -> EngineLoad:
        """Return how busy the engine is; may be called from any thread, and is then a moment's view."""
        waiting, running = self.scheduler.waiting, list(self.scheduler.running)
        return EngineLoad(
            num_waiting_requests=len(waiting),
            num_waiting_tokens=sum(s.num_tokens for s in waiting),
            num_running_sequences=len(running),
            kv_cache_bytes=sum(s.cache.num_bytes for s in running),
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
        except MemoryError:
            self._fail_sequences([item.sequence for item in plan], EngineError("the server ran out of memory"))
        self._flush()
        return True

    def _forward(self, plan: list[Scheduled]) -> npt.NDArray[np.floating]:
        """Run the model over the flat ragged batch of the plan; return hidden [tokens, dim]."""
        counts = [item.num_tokens for item in plan]
        batch = Batch(
            token_ids=np.concatenate([item.sequence.next_ids(item.num_tokens) for item in plan]),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            prefix_lengths=np.array([item.sequence.num_computed for item in plan], np.int64),
        )
        for item in plan:
            item.sequence.begin_work()
        return self.decoder.forward(batch, [item.sequence.cache for item in plan])

    def _postprocess(self, plan: list[Scheduled], hidden: npt.NDArray[np.floating]) -> None:
        """Score prompts where asked, and give every sequence that has seen all its tokens its next one."""
        ends = np.cumsum([item.num_tokens for item in plan])
        ready, rows = [], []
        for item, end in zip(plan, ends, strict=True):
            sequence = item.sequence
            if sequence.request.prompt_logprobs and sequence.index == 0:
                self._score(sequence, hidden[end - item.num_tokens : end])
            if sequence.num_remaining == 0:
                ready.append(sequence)
                rows.append(end - 1)
        scored_only = [s for s in ready if s.request.max_tokens == 0]
        for sequence in scored_only:
            self._finish(sequence, FinishReason.MAX_TOKENS, None)
        keep = [i for i, s in enumerate(ready) if s.request.max_tokens > 0]
        if keep:
            self._sample([ready[i] for i in keep], self.decoder.head(hidden[[rows[i] for i in keep]]))

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

    def _sample(self, sequences: list[Sequence], logits: npt.NDArray[np.float32]) -> None:
        """Choose the next token of each sequence from its row of logits [rows, vocab]."""
        choices, rows = [], []
        for row, sequence in enumerate(sequences):
            for choice in self._choices_at(sequence):
                choices.append(choice)
                rows.append(row)
        if rows != list(range(len(sequences))):
            logits = logits[rows]
        samples = sample_rows([choice.sampler for choice in choices], logits, buffers=self._buffers)
        for choice, sample, raw in zip(choices, samples, logits, strict=True):
            if isinstance(sample, TreadleError):
                self._fail(choice.active, sample)
            elif not choice.is_cancelled:
                self._advance(choice, sample, raw)

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
            roomy = self.scheduler.has_room_for(sequence.cache.num_bytes)
            fork = sequence.fork(index, sequence.cache.fork() if roomy else self.decoder.new_cache())
            self.scheduler.add_fork(fork)
            forks.append(fork)
        return forks

    def _advance(self, sequence: Sequence, sample: Sample, raw: npt.NDArray[np.float32]) -> None:
        """Append a sampled token, tell the reader, and finish the sequence when it is its last."""
        token_id = sample.token_id
        logprob = _chosen_logprob(sequence.request, sample, raw)
        try:
            sequence.append(token_id)
        except TreadleError as error:
            self._fail(sequence.active, error)
            return
        sequence.note_token()
        self.num_generated_tokens += 1
        reason, matched = _finish_reason(sequence, token_id)
        self._emit(sequence, NewToken(sequence.index, token_id, matched is not None, logprob, sequence.timings()))
        if reason is not None:
            self._finish(sequence, reason, matched)

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: int | None) -> None:
        self._emit(sequence, ChoiceFinished(sequence.index, reason, matched, sequence.timings()))
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


def _chosen_logprob(request: GenerationRequest, sample: Sample, raw: npt.NDArray[np.float32]) -> TokenLogprob | None:
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
