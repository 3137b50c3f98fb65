"""TraceService: shows the intermediates of a forward pass, and what every stage of a sampling chain does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import numpy.typing as npt
from treadle_protos.v1 import trace_pb2 as pb
from treadle_protos.v1 import trace_pb2_grpc

from treadle_server.engine.events import is_over
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model import (
    LanguageModel,
    PreviewSpec,
    SamplingPreview,
    StageResult,
    preview_logits,
)
from treadle_server.language_model import Trace as TraceResult
from treadle_server.plugins.manager import PluginManager
from treadle_server.service import convert
from treadle_server.service.observability.call_record import current_call
from treadle_server.service.off_loop import Deliveries, Inbox, run_off_loop
from treadle_server.service.served_models import ServedModels

# Largest data of one message of a trace, in bytes.
_PART_BYTES = 1 << 20
# A trace is held in memory until its client has read it.
_MAX_TRACES = 2


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Runs on the event loop; checking and sampling run in `executor`, the model on the engine thread."""

    def __init__(
        self, models: ServedModels, plugins: PluginManager, executor: Executor, max_message_bytes: int
    ) -> None:
        self._models = models
        self._plugins = plugins
        self._executor = executor
        self._max_message_bytes = max_message_bytes
        self._slots = asyncio.Semaphore(_MAX_TRACES)

    async def Trace(
        self, request: pb.TraceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TraceResponse]:
        """Trace a prompt and stream the tensors; further traces wait meanwhile."""
        model = current_call().uses(self._models.get(request.model))
        async with self._slots:
            with convert.proto_paths(request):
                trace = await self._trace(model, request)
            yield pb.TraceResponse(info=_info(model, trace))
            part_bytes = min(_PART_BYTES, self._max_message_bytes // 2)
            for name, array in trace.items():
                for part in _parts(name, array, part_bytes):
                    yield pb.TraceResponse(part=part)

    async def _trace(self, model: LanguageModel, request: pb.TraceRequest) -> TraceResult:
        """Run a trace; one whose RPC ends before it starts is dropped."""
        prompt = convert.prompt_from_proto(request)
        layers, what = tuple(request.layers), tuple(request.what)
        begin = partial(model.begin_trace, prompt, layers=layers, what=what, adapter=request.adapter)
        future: Future[TraceResult] = await run_off_loop(self._executor, begin, lambda begun: begun.cancel())
        return await asyncio.wrap_future(future)

    async def PreviewSampling(
        self, request: pb.PreviewSamplingRequest, context: grpc.aio.ServicerContext
    ) -> pb.PreviewSamplingResponse:
        """Run a chain, on a prompt's logits or on given ones."""
        with convert.proto_paths(request):
            spec = await run_off_loop(self._executor, partial(_spec_from_proto, request))
            if spec.logits is None:
                preview = await self._preview_prompt(current_call().uses(self._models.get(request.model)), spec)
            else:
                preview = await run_off_loop(self._executor, partial(self._preview_logits, request.model, spec))
        return await run_off_loop(self._executor, partial(self._preview_to_proto, preview))

    async def _preview_prompt(self, model: LanguageModel, spec: PreviewSpec) -> SamplingPreview:
        inbox: Inbox = asyncio.Queue()
        begin = partial(model.previewer.begin, spec, Deliveries().to(inbox))
        pending = await run_off_loop(self._executor, begin, lambda begun: begun.active.cancel())
        try:
            while not is_over(await inbox.get()):
                pass
        finally:
            pending.active.cancel()
        return await run_off_loop(self._executor, pending.finish)

    def _preview_logits(self, name: str, spec: PreviewSpec) -> SamplingPreview:
        """Run a chain on logits of the named model, of the only one where they fit, or of none."""
        if name:
            return self._models.get(name).previewer.preview(spec)
        only = self._models.only()
        if only is not None and only.previewer.has_logits_of(np.size(cast("Any", spec.logits))):
            return only.previewer.preview(spec)
        return preview_logits(spec, self._plugins.registry)

    def _preview_to_proto(self, preview: SamplingPreview) -> pb.PreviewSamplingResponse:
        response = pb.PreviewSamplingResponse(
            vocab_size=preview.initial.vocab_size,
            initial=_stage_to_proto(preview.initial),
            stages=[_stage_to_proto(stage) for stage in preview.stages],
            chosen_token_id=preview.chosen,
            seed=preview.seed,
            knobs=convert.values_to_proto(preview.knobs),
        )
        if (num_bytes := response.ByteSize()) > self._max_message_bytes:
            message = f"make distributions of {num_bytes} bytes; a message takes at most {self._max_message_bytes}"
            raise InvalidRequestError.of("sampling.stages", message)
        return response


def _spec_from_proto(request: pb.PreviewSamplingRequest) -> PreviewSpec:
    if request.sampling.use_model_defaults:
        raise InvalidRequestError.of("use_model_defaults", "must be false or unset: a preview takes no model defaults")
    given = request.WhichOneof("prompt") == "logits"
    fields = convert.sampling_from_proto(request.sampling)
    if request.HasField("min_tokens"):
        fields["knobs"]["min_tokens"] = request.min_tokens
    return PreviewSpec(
        prompt=None if given else convert.prompt_from_proto(request),
        logits=np.array(request.logits.values, np.float64) if given else None,
        prompt_ids=tuple(request.prompt_ids),
        output_ids=tuple(request.output_ids),
        eos_ids=tuple(request.eos_ids),
        stop_token_ids=tuple(request.stop_token_ids),
        adapter=request.adapter,
        preset=request.preset,
        **fields,
    )


def _stage_to_proto(result: StageResult) -> pb.StageDistribution:
    return pb.StageDistribution(
        stage=convert.stage_to_proto(result.stage, result.parameters),
        kept_ids=result.kept.tolist(),
        probabilities=result.kept_probabilities.tolist(),
    )


def _info(model: LanguageModel, trace: TraceResult) -> pb.TraceInfo:
    return pb.TraceInfo(
        model=model.name,
        weight_version=trace.weight_version,
        token_ids=trace.token_ids,
        tokens=[model.tokenizer.token_bytes(token_id) for token_id in trace.token_ids],
        names=list(trace),
    )


def _parts(name: str, array: npt.NDArray[Any], part_bytes: int) -> Iterator[pb.TensorPart]:
    """Cut a tensor into messages of at most that much data."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = array.reshape(-1).view(np.uint8).data
    for offset in range(0, max(1, len(data)), part_bytes):
        chunk = bytes(data[offset : offset + part_bytes])
        yield pb.TensorPart(name=name, dtype=array.dtype.name, shape=array.shape, offset=offset, data=chunk)
