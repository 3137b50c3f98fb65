"""GenerationService: generates, scores and tokenises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc

from treadle_server.engine.events import EngineEvent, PromptScored, RequestFailed, TokenLogprob
from treadle_server.engine.sequence import ActiveRequest
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model import (
    Delta,
    Generation,
    GenerationEvent,
    LanguageModel,
    PromptInfo,
    gather,
)
from treadle_server.language_model.validation import token_id_violations
from treadle_server.service import convert
from treadle_server.service.served_models import ServedModels

_T = TypeVar("_T")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Runs on the event loop; tokenising and checking run in `executor`, the model on the engine thread."""

    def __init__(self, models: ServedModels, executor: Executor) -> None:
        self._models = models
        self._executor = executor

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        """Generate, and answer once."""
        model = self._models.get(request.spec.model)
        token_ids = request.spec.response.token_ids
        events = [event async for event in self._events(model, request.spec)]
        result = gather(events)
        return pb.GenerateResponse(
            prompt_info=convert.prompt_info_to_proto(result.prompt_info, model.tokenizer, token_ids=token_ids),
            choices=[convert.choice_to_proto(c, model.tokenizer, token_ids=token_ids) for c in result.choices],
        )

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

    async def _events(self, model: LanguageModel, message: pb.GenerationSpec) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation; the engine stops working on it when this is closed."""
        inbox: asyncio.Queue[list[EngineEvent]] = asyncio.Queue()
        with convert.proto_paths(message):
            spec = convert.spec_from_proto(message)
            generation = await self._run(partial(model.start, spec, _deliver_to(inbox)), Generation.cancel)
        try:
            for event in generation.start():
                yield event
            while not generation.finished:
                for event in generation.feed(await inbox.get()):
                    yield event
        finally:
            generation.cancel()

    async def _run(self, function: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """Run a function off the event loop; when the RPC ends meanwhile, `undo` gets what it returns."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(partial(_undo, undo))
            raise

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Return the raw log-probability of every given token."""
        model = self._models.get(request.model)
        if request.adapter:
            raise InvalidRequestError.of("adapter", f"there is no adapter {request.adapter!r}")
        inbox: asyncio.Queue[list[EngineEvent]] = asyncio.Queue()
        with convert.proto_paths(request):
            prompt, num_top = convert.prompt_from_proto(request), request.num_top_logprobs
            begin = partial(model.begin_score, prompt, _deliver_to(inbox), num_top_logprobs=num_top)
            scoring = await self._run(begin, ActiveRequest.cancel)
        try:
            scored = await _collect_scores(inbox)
        finally:
            scoring.cancel()
        return pb.ScoreResponse(
            model=model.name,
            weight_version=model.weight_version,
            raw_logprobs=convert.logprobs_to_proto(scored, model.tokenizer),
            total_logprob=sum(item.logprob for item in scored if item.logprob is not None),
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Return the tokens of a text or of rendered messages."""
        model = self._models.get(request.model)
        prompt = convert.input_from_proto(request)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        tokens = await self._run(partial(model.tokenize, prompt, add_special_tokens=special))
        return pb.TokenizeResponse(
            tokens=[
                pb.Token(id=i, token=model.tokenizer.token_bytes(i), start=start, end=end) for i, start, end in tokens
            ]
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        model = self._models.get(request.model)
        violations = list(token_id_violations("token_ids", request.token_ids, model.vocab_size))
        if violations:
            raise InvalidRequestError(violations)
        decode = partial(
            model.tokenizer.decode, list(request.token_ids), skip_special_tokens=not request.special_tokens
        )
        return pb.DetokenizeResponse(text=await self._run(decode))


def _deliver_to(inbox: asyncio.Queue[list[EngineEvent]]) -> Callable[[list[EngineEvent]], None]:
    """Return a function that puts events into the inbox from another thread."""
    loop = asyncio.get_running_loop()

    def deliver(events: list[EngineEvent]) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, events)

    return deliver


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


async def _collect_scores(inbox: asyncio.Queue[list[EngineEvent]]) -> list[TokenLogprob]:
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
