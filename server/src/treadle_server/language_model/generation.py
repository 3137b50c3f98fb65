"""One generation under way: reads the engine's events and gives out text."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.events import (
    ChoiceFinished,
    EngineEvent,
    FinishReason,
    NewToken,
    PromptScored,
    RequestFailed,
    Timings,
    TokenCounts,
    TokenLogprob,
    is_over,
)
from treadle_server.engine.sequence import ActiveRequest
from treadle_server.language_model.report import RequestReport
from treadle_server.language_model.spec import (
    Choice,
    Delta,
    FinishInfo,
    GenerationEvent,
    GenerationResult,
    GenerationSpec,
    PromptInfo,
)
from treadle_server.language_model.text import ChoiceText
from treadle_server.tokenizer import Tokenizer


class Generation:
    """Turns engine events into generation events. Belongs to the thread that reads it.

    Attributes:
        info: what the model made of the request, without the prompt's log-probabilities.
        finished: whether every choice has ended.
        finishes: how choices have ended so far, in that order.
    """

    def __init__(
        self,
        active: ActiveRequest,
        spec: GenerationSpec,
        info: PromptInfo,
        tokenizer: Tokenizer,
        report: RequestReport,
    ) -> None:
        self._active = active
        self._report = report
        self._spec = spec
        self.info = info
        self._tokenizer = tokenizer
        self._texts = {i: ChoiceText(tokenizer, spec, info.prompt_ids) for i in range(spec.n)}
        self._open = set(self._texts)
        self._prompt_logprobs: list[TokenLogprob] = []
        self._introduced = False
        self.finishes: list[FinishInfo] = []

    @property
    def arrived_s(self) -> float:
        """When the engine got the request, in seconds of the monotonic clock."""
        return self._active.arrived_s

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(text.num_tokens for text in self._texts.values())

    @property
    def timings(self) -> Timings:
        """Durations up to the newest token."""
        return self._report.timings

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def cancel(self) -> None:
        """Drop the generation; the engine stops working on it before its next step."""
        self._active.cancel()
        self._close_report()

    def _close_report(self, error: str = "") -> None:
        self._report.close([text.num_tokens for text in self._texts.values()], error)

    def taken(self, events: Sequence[EngineEvent]) -> None:
        """Note that whoever reads is done with what became of events; without that the engine stops making more."""
        self._active.taken(events)

    def start(self) -> list[GenerationEvent]:
        """Return what can be told before the first step."""
        return [] if self._spec.prompt_logprobs else self._introduce()

    def _introduce(self) -> list[GenerationEvent]:
        """Return the first message, and the prompt's text when it is to be echoed."""
        self._introduced = True
        events: list[GenerationEvent] = [replace(self.info, prompt_logprobs=tuple(self._prompt_logprobs))]
        if self._spec.echo:
            skip = not self._spec.special_tokens
            prompt = self._tokenizer.decode(list(self.info.prompt_ids), skip_special_tokens=skip)
            events += [Delta(index=index, text=prompt) for index in self._texts]
        return events

    def feed(self, events: Iterable[EngineEvent]) -> list[GenerationEvent]:
        """Turn engine events into generation events, with one delta for each choice at most.

        Raises:
            TreadleError: the request has failed.
        """
        return _merged(out for event in events for out in self._feed_one(event))

    def _feed_one(self, event: EngineEvent) -> Iterator[GenerationEvent]:
        if isinstance(event, RequestFailed):
            self._open.clear()
            self._close_report(str(event.error))
            raise event.error
        if isinstance(event, PromptScored):
            self._prompt_logprobs += event.logprobs
            return
        if not self._introduced:
            yield from self._introduce()
        if event.index not in self._open:
            return
        self._report.note(event.timings)
        if isinstance(event, NewToken):
            yield from self._token(event)
        else:
            yield from self._end(event)

    def _token(self, event: NewToken) -> Iterator[GenerationEvent]:
        choice = self._texts[event.index]
        text = choice.push(event.token_id, is_stop=event.is_stop)
        logprobs = (event.logprob,) if event.logprob else ()
        yield Delta(index=event.index, text=text, token_ids=(event.token_id,), logprobs=logprobs)
        if choice.matched is not None:
            self._active.cancel(event.index)
            yield self._finish(event.index, FinishReason.STOP_STRING, choice.matched, event.timings, event.counts)

    def _end(self, event: ChoiceFinished) -> Iterator[GenerationEvent]:
        choice = self._texts[event.index]
        tail = choice.flush() if event.matched_token_id is None else ""
        if tail:
            yield Delta(index=event.index, text=tail)
        if choice.matched is not None:  # the held text held a whole stop string
            yield self._finish(event.index, FinishReason.STOP_STRING, choice.matched, event.timings, event.counts)
        else:
            yield self._finish(event.index, event.reason, event.matched_token_id, event.timings, event.counts)

    def _finish(
        self,
        index: int,
        reason: FinishReason,
        matched: str | int | None,
        timings: Timings,
        counts: TokenCounts,
    ) -> FinishInfo:
        self._open.discard(index)
        finish = FinishInfo(
            index=index,
            reason=reason,
            matched=matched,
            num_prompt_tokens=len(self.info.prompt_ids),
            num_generated_tokens=self._texts[index].num_tokens,
            num_cached_tokens=counts.num_cached,
            num_draft_tokens=counts.num_draft,
            num_accepted_tokens=counts.num_accepted,
            timings=timings,
            weight_version=self.info.weight_version,
        )
        self.finishes.append(finish)
        self._report.choice_ended(finish)
        if not self._open:
            self._close_report()
        return finish


def _merged(events: Iterable[GenerationEvent]) -> list[GenerationEvent]:
    """Return events with the deltas of each choice as one: to send a message costs far more than what is in it."""
    merged: list[GenerationEvent] = []
    places: dict[int, int] = {}
    for event in events:
        place = places.setdefault(event.index, len(merged)) if isinstance(event, Delta) else len(merged)
        if place < len(merged):
            merged[place] = cast("Delta", merged[place]).followed_by(cast("Delta", event))
        else:
            merged.append(event)
    return merged


def prompt_info_of(active: ActiveRequest, model: str) -> PromptInfo:
    """Return what was made of a request of the named model."""
    request = active.request
    return PromptInfo(
        request_id=request.request_id,
        model=model,
        weight_version=active.weight_version,
        adapter="" if request.adapter is None else request.adapter.name,
        adapter_version=request.adapter_version,
        prompt_ids=tuple(request.prompt_ids.tolist()),
        max_tokens=request.max_tokens,
        seed=request.seed,
        knobs=request.chain.knobs,
        chain=tuple(StageSpec(s.name, s.stage.model_dump()) for s in request.chain.stages),
    )


def read(generation: Generation, inbox: queue.SimpleQueue[list[EngineEvent]]) -> Iterator[GenerationEvent]:
    """Yield the events of a generation as they come; closing it stops the work."""
    try:
        yield from generation.start()
        while not generation.finished:
            events = inbox.get()
            yield from generation.feed(events)
            generation.taken(events)
    finally:
        generation.cancel()


def read_scores(active: ActiveRequest, inbox: queue.SimpleQueue[list[EngineEvent]]) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a prompt's tokens, once they are all there.

    Raises:
        TreadleError: the request has failed.
    """
    scored: list[TokenLogprob] = []
    while True:
        events = inbox.get()
        scored += prompt_scores(events)
        active.taken(events)
        if is_over(events):
            return tuple(scored)


def prompt_scores(events: Iterable[EngineEvent]) -> list[TokenLogprob]:
    """Return the log-probabilities of prompt tokens among events."""
    return [entry for event in events if isinstance(event, PromptScored) for entry in event.logprobs]


def gather(events: Iterable[GenerationEvent]) -> GenerationResult:
    """Join the events of a finished generation."""
    info: PromptInfo | None = None
    deltas: dict[int, list[Delta]] = {}
    finishes: list[FinishInfo] = []
    for event in events:
        if isinstance(event, PromptInfo):
            info = event
        elif isinstance(event, Delta):
            deltas.setdefault(event.index, []).append(event)
        else:
            finishes.append(event)
    if info is None:
        raise ValueError("the events hold no PromptInfo")
    finishes.sort(key=lambda finish: finish.index)
    return GenerationResult(prompt_info=info, choices=tuple(_choice(f, deltas.get(f.index, [])) for f in finishes))


def _choice(finish: FinishInfo, deltas: list[Delta]) -> Choice:
    return Choice(
        index=finish.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(p for delta in deltas for p in delta.logprobs),
        finish=finish,
    )
