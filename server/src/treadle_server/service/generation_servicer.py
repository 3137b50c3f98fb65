"""GenerationService: generates, scores and tokenises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import grpc
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc

from treadle_server.engine.events import TokenLogprob, is_over
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model import (
    Delta,
    Generation,
    GenerationEvent,
    GenerationSpec,
    LanguageModel,
    PromptInfo,
    gather,
)
from treadle_server.language_model.best_of import keep_best, widen
from treadle_server.language_model.generation import prompt_scores
from treadle_server.language_model.validation import check_best_of, refuse
from treadle_server.service import convert
from treadle_server.service.observability.call_record import current_call, current_request_id
from treadle_server.service.off_loop import Deliveries, Inbox, run_off_loop
from treadle_server.service.served_models import ServedModels

_T = TypeVar("_T")

# Bytes of a log-probability with its token in a message, on the large side.
_LOGPROB_BYTES = 32


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Runs on the event loop; tokenising and checking run in `executor`, the model on the engine thread."""

    def __init__(self, models: ServedModels, executor: Executor, max_message_bytes: int) -> None:
        self._models = models
        self._executor = executor
        self._max_message_bytes = max_message_bytes
        self._deliveries = Deliveries()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        """Generate, and answer once."""
        model = self._model(request.spec.model, generates=True)
        spec = await self._spec(request.spec)
        events = [event async for event in self._events(model, request.spec, spec, unary=True)]
        return await self._run(partial(_response, events, model, spec, token_ids=request.spec.response.token_ids))

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Generate, and answer as it goes."""
        model = self._model(request.spec.model, generates=True)
        token_ids = request.spec.response.token_ids
        spec = await self._spec(request.spec)
        async with aclosing(self._events(model, request.spec, spec)) as events:
            async for event in events:
                response = _stream_response(event, model, token_ids=token_ids)
                if response is not None:
                    yield response

    def _model(self, name: str, *, generates: bool = False) -> LanguageModel:
        """Return the served model that a request names, noted in the record of its RPC."""
        call = current_call()
        call.generates_text = generates
        return call.uses(self._models.get(name))

    async def _spec(self, message: pb.GenerationSpec) -> GenerationSpec:
        with convert.proto_paths(message):
            return await self._run(partial(convert.spec_from_proto, message))

    async def _events(
        self, model: LanguageModel, message: pb.GenerationSpec, spec: GenerationSpec, *, unary: bool = False
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation; the engine stops working on it when this is closed."""
        inbox: Inbox = asyncio.Queue()
        with convert.proto_paths(message):
            max_bytes = self._max_message_bytes
            begin = partial(_start, model, spec, self._deliveries.to(inbox), max_bytes=max_bytes, unary=unary)
            generation = await self._run(begin, Generation.cancel)
        current_call().generates(generation)
        try:
            for event in generation.start():
                yield event
            while not generation.finished:
                taken = await inbox.get()
                for event in generation.feed(taken):
                    yield event  # comes back when the message is on its way: gRPC lets a client hold it up
                generation.taken(taken)
        finally:
            generation.cancel()

    async def _run(self, function: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        return await run_off_loop(self._executor, function, undo)

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Return the raw log-probability of every given token."""
        model = self._model(request.model)
        inbox: Inbox = asyncio.Queue()
        with convert.proto_paths(request):
            begin = partial(_begin_score, model, request, self._deliveries.to(inbox), max_bytes=self._max_message_bytes)
            scoring = await self._run(begin, ActiveRequest.cancel)
        current_call().scores(scoring)
        try:
            scored = await _collect_scores(scoring, inbox)
        finally:
            scoring.cancel()
        return await self._run(partial(_score_response, scored, scoring, model))

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Return the tokens of a text or of rendered messages."""
        model = self._model(request.model)
        return await self._run(partial(_tokenize, model, request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        model = self._model(request.model)
        decode = partial(model.detokenize, request.token_ids, special_tokens=request.special_tokens)
        return pb.DetokenizeResponse(text=await self._run(decode))


def _start(model: LanguageModel, spec: GenerationSpec, deliver: Deliver, *, max_bytes: int, unary: bool) -> Generation:
    """Queue a generation; refuse one whose log-probabilities could not be sent."""
    if unary:
        check_best_of(spec, model.request_limits)
    generation = model.start(widen(spec) if unary else spec, deliver, request_id=current_request_id() or None)
    try:
        num_positions = len(generation.info.prompt_ids) if spec.prompt_logprobs else 0
        if unary and spec.logprobs is not LogprobsMode.NONE:
            num_positions += spec.n * generation.info.max_tokens
        _check_answer_size("num_top_logprobs", num_positions, spec.num_top_logprobs, max_bytes)
    except InvalidRequestError:
        generation.cancel()
        raise
    return generation


def _check_answer_size(field: str, num_positions: int, num_top: int, max_bytes: int) -> None:
    """Refuse log-probabilities that would not fit in a message, before the work is done for nothing."""
    size = num_positions * (num_top + 1) * _LOGPROB_BYTES
    if size > max_bytes:
        raise refuse(field, "answer_size", value=size, limit=max_bytes)


def _response(
    events: list[GenerationEvent], model: LanguageModel, spec: GenerationSpec, *, token_ids: bool
) -> pb.GenerateResponse:
    result = keep_best(gather(events), spec)
    return pb.GenerateResponse(
        prompt_info=convert.prompt_info_to_proto(result.prompt_info, model.tokenizer, token_ids=token_ids),
        choices=[convert.choice_to_proto(c, model.tokenizer, token_ids=token_ids) for c in result.choices],
    )


def _begin_score(model: LanguageModel, request: pb.ScoreRequest, deliver: Deliver, *, max_bytes: int) -> ActiveRequest:
    num_top = request.num_top_logprobs
    prompt = convert.prompt_from_proto(request)
    scoring = model.begin_score(
        prompt, deliver, num_top_logprobs=num_top, adapter=request.adapter, request_id=current_request_id() or None
    )
    try:
        _check_answer_size("num_top_logprobs", len(scoring.request.prompt_ids), num_top, max_bytes)
    except InvalidRequestError:
        scoring.cancel()
        raise
    return scoring


def _score_response(scored: list[TokenLogprob], scoring: ActiveRequest, model: LanguageModel) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        model=model.name,
        weight_version=scoring.weight_version,
        adapter_version=scoring.request.adapter_version,
        raw_logprobs=convert.logprobs_to_proto(scored, model.tokenizer),
        total_logprob=sum(item.logprob for item in scored if item.logprob is not None),
    )


def _tokenize(model: LanguageModel, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    tokens = model.tokenize(convert.input_from_proto(request), add_special_tokens=special)
    token_bytes = model.tokenizer.token_bytes
    return pb.TokenizeResponse(
        tokens=[pb.Token(id=i, token=token_bytes(i), start=start, end=end) for i, start, end in tokens]
    )


async def _collect_scores(scoring: ActiveRequest, inbox: Inbox) -> list[TokenLogprob]:
    scored: list[TokenLogprob] = []
    while True:
        events = await inbox.get()
        scored += prompt_scores(events)
        scoring.taken(events)
        if is_over(events):
            return scored


def _stream_response(
    event: GenerationEvent, model: LanguageModel, *, token_ids: bool
) -> pb.GenerateStreamResponse | None:
    """Return the message of an event; None for a delta that would say nothing."""
    if isinstance(event, PromptInfo):
        info = convert.prompt_info_to_proto(event, model.tokenizer, token_ids=token_ids)
        return pb.GenerateStreamResponse(prompt_info=info)
    if isinstance(event, Delta):
        if not event.text and not token_ids and not event.logprobs:
            return None
        return convert.delta_to_proto(event, model.tokenizer, token_ids=token_ids)
    return pb.GenerateStreamResponse(finish_info=convert.finish_info_to_proto(event))
