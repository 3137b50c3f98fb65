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

from treadle_server.engine.events import PromptScored, RequestFailed, TokenLogprob
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model import (
    Delta,
    Generation,
    GenerationEvent,
    LanguageModel,
    PromptInfo,
    gather,
)
from treadle_server.language_model.best_of import keep_best, widen
from treadle_server.language_model.validation import check_best_of, refuse
from treadle_server.service import convert
from treadle_server.service.off_loop import Inbox, deliver_to, run_off_loop
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

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        """Generate, and answer once."""
        model = self._models.get(request.spec.model)
        events = [event async for event in self._events(model, request.spec, unary=True)]
        return await self._run(partial(_response, events, model, request.spec))

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Generate, and answer as it goes."""
        model = self._models.get(request.spec.model)
        token_ids = request.spec.response.token_ids
        async with aclosing(self._events(model, request.spec)) as events:
            async for event in events:
                response = _stream_response(event, model, token_ids=token_ids)
                if response is not None:
                    yield response

    async def _events(
        self, model: LanguageModel, message: pb.GenerationSpec, *, unary: bool = False
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation; the engine stops working on it when this is closed."""
        inbox: Inbox = asyncio.Queue()
        with convert.proto_paths(message):
            max_bytes = self._max_message_bytes
            begin = partial(_start, model, message, deliver_to(inbox), max_bytes=max_bytes, unary=unary)
            generation = await self._run(begin, Generation.cancel)
        try:
            for event in generation.start():
                yield event
            while not generation.finished:
                for event in generation.feed(await inbox.get()):
                    yield event
        finally:
            generation.cancel()

    async def _run(self, function: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        return await run_off_loop(self._executor, function, undo)

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Return the raw log-probability of every given token."""
        model = self._models.get(request.model)
        convert.refuse_adapter(request.adapter)
        inbox: Inbox = asyncio.Queue()
        with convert.proto_paths(request):
            begin = partial(_begin_score, model, request, deliver_to(inbox), max_bytes=self._max_message_bytes)
            scoring = await self._run(begin, ActiveRequest.cancel)
        try:
            scored = await _collect_scores(inbox)
        finally:
            scoring.cancel()
        return await self._run(partial(_score_response, scored, model))

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Return the tokens of a text or of rendered messages."""
        model = self._models.get(request.model)
        return await self._run(partial(_tokenize, model, request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        model = self._models.get(request.model)
        decode = partial(model.detokenize, request.token_ids, special_tokens=request.special_tokens)
        return pb.DetokenizeResponse(text=await self._run(decode))


def _start(
    model: LanguageModel, message: pb.GenerationSpec, deliver: Deliver, *, max_bytes: int, unary: bool
) -> Generation:
    """Queue a generation; refuse one whose log-probabilities could not be sent."""
    spec = convert.spec_from_proto(message)
    if unary:
        check_best_of(spec, model.request_limits)
        spec = widen(spec)
    generation = model.start(spec, deliver)
    try:
        num_positions = len(generation.info.prompt_ids) if spec.prompt_logprobs else 0
        if unary and spec.logprobs is not LogprobsMode.NONE and message.best_of == 0:
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


def _response(events: list[GenerationEvent], model: LanguageModel, message: pb.GenerationSpec) -> pb.GenerateResponse:
    token_ids = message.response.token_ids
    result = keep_best(gather(events), convert.spec_from_proto(message))
    return pb.GenerateResponse(
        prompt_info=convert.prompt_info_to_proto(result.prompt_info, model.tokenizer, token_ids=token_ids),
        choices=[convert.choice_to_proto(c, model.tokenizer, token_ids=token_ids) for c in result.choices],
    )


def _begin_score(model: LanguageModel, request: pb.ScoreRequest, deliver: Deliver, *, max_bytes: int) -> ActiveRequest:
    num_top = request.num_top_logprobs
    scoring = model.begin_score(convert.prompt_from_proto(request), deliver, num_top_logprobs=num_top)
    try:
        _check_answer_size("num_top_logprobs", len(scoring.request.prompt_ids), num_top, max_bytes)
    except InvalidRequestError:
        scoring.cancel()
        raise
    return scoring


def _score_response(scored: list[TokenLogprob], model: LanguageModel) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        model=model.name,
        weight_version=model.weight_version,
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


async def _collect_scores(inbox: Inbox) -> list[TokenLogprob]:
    scored: list[TokenLogprob] = []
    while True:
        for event in await inbox.get():
            if isinstance(event, RequestFailed):
                raise event.error
            if not isinstance(event, PromptScored):
                return scored
            scored += event.logprobs


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
        return pb.GenerateStreamResponse(delta=convert.delta_to_proto(event, model.tokenizer, token_ids=token_ids))
    return pb.GenerateStreamResponse(finish_info=convert.finish_info_to_proto(event))
