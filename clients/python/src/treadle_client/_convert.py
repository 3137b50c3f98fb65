"""Requests from arguments (`*_request`), and models from responses (`*_from_proto`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from treadle_protos.v1 import generation_pb2, model_pb2, sampler_pb2, server_pb2, trace_pb2, value_pb2

from treadle_client._fields import enum_names, set_field
from treadle_client._models import (
    Adapter,
    Choice,
    Chunk,
    Finish,
    Generation,
    Limits,
    Model,
    ModelLoad,
    Plugin,
    Preview,
    PreviewStage,
    PromptInfo,
    Sampler,
    Samplers,
    Score,
    ServerInfo,
    Stage,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
    Trace,
    Usage,
)
from treadle_client._options import make_spec, set_prompt
from treadle_client._tensors import make_array, make_vector

_Request = TypeVar("_Request", bound=Message)


def generate_request(prompt: object, options: Mapping[str, object]) -> generation_pb2.GenerateRequest:
    """Make the request of `generate`."""
    return generation_pb2.GenerateRequest(spec=make_spec(prompt, options))


def generate_stream_request(prompt: object, options: Mapping[str, object]) -> generation_pb2.GenerateStreamRequest:
    """Make the request of `stream`."""
    return generation_pb2.GenerateStreamRequest(spec=make_spec(prompt, options))


def score_request(prompt: object, **fields: object) -> generation_pb2.ScoreRequest:
    """Make the request of `score`; fields that are None stay unset."""
    request = generation_pb2.ScoreRequest()
    set_prompt(request, prompt)
    return _with_fields(request, fields)


def tokenize_request(prompt: object, **fields: object) -> generation_pb2.TokenizeRequest:
    """Make the request of `tokenize`; fields that are None stay unset."""
    request = generation_pb2.TokenizeRequest()
    set_prompt(request, prompt)
    return _with_fields(request, fields)


def detokenize_request(**fields: object) -> generation_pb2.DetokenizeRequest:
    """Make the request of `detokenize`; fields that are None stay unset."""
    return _with_fields(generation_pb2.DetokenizeRequest(), fields)


def make_request(kind: type[_Request], **fields: object) -> _Request:
    """Make a request of plain fields; those that are None stay unset."""
    return _with_fields(kind(), fields)


def trace_request(prompt: object, *, what: object, **fields: object) -> trace_pb2.TraceRequest:
    """Make the request of `trace`; fields that are None stay unset, and `what` may be one name."""
    request = trace_pb2.TraceRequest()
    set_prompt(request, prompt)
    return _with_fields(request, {**fields, "what": [what] if isinstance(what, str) else what})


def _with_fields(request: _Request, fields: Mapping[str, object]) -> _Request:
    for name, value in fields.items():
        if value is not None:
            set_field(request, name, value, name)
    return request


def value_from_proto(value: value_pb2.Value) -> object:
    """Return the Python value of a typed value; None for one that holds nothing."""
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "list_value":
        return [value_from_proto(item) for item in value.list_value.values]
    if kind == "map_value":
        return values_from_proto(value.map_value.values)
    result: object = getattr(value, kind)
    return result


def values_from_proto(values: Mapping[str, value_pb2.Value]) -> dict[str, object]:
    """Return named typed values as Python values."""
    return {name: value_from_proto(value) for name, value in values.items()}


def enum_name(descriptor: Any, number: int) -> str:
    """Return the short name of an enum's value: `stop_string` for FINISH_REASON_STOP_STRING."""
    names = {value: name for name, value in enum_names(descriptor).items()}
    return names.get(number, f"unknown_{number}")


def prompt_info_from_proto(info: generation_pb2.PromptInfo) -> PromptInfo:
    """Convert the first message of a stream."""
    return PromptInfo(
        request_id=info.request_id,
        model=info.model,
        weight_version=info.weight_version,
        num_prompt_tokens=info.num_prompt_tokens,
        max_tokens=info.max_tokens,
        seed=info.seed,
        knobs=values_from_proto(info.knobs),
        chain=tuple(Stage(stage.name, values_from_proto(stage.parameters)) for stage in info.chain),
        prompt_token_ids=tuple(info.prompt_token_ids),
        prompt_logprobs=_logprobs(info.prompt_logprobs),
        adapter=info.adapter,
        adapter_version=info.adapter_version,
    )


def _logprobs(logprobs: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=item.token_id,
            token=item.token,
            logprob=item.logprob if item.HasField("logprob") else None,
            rank=item.rank if item.HasField("rank") else None,
            top=tuple(TopLogprob(token_id=t.token_id, token=t.token, logprob=t.logprob) for t in item.top),
        )
        for item in logprobs
    )


def chunk_from_proto(response: generation_pb2.GenerateStreamResponse) -> Chunk:
    """Convert a delta or the end of a choice."""
    if response.WhichOneof("event") == "finish_info":
        info = response.finish_info
        return Chunk(index=info.index, text="", token_ids=(), logprobs=(), finish=finish_from_proto(info))
    delta = response.delta
    return Chunk(
        index=delta.index,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=_logprobs(delta.logprobs),
        finish=None,
    )


def finish_from_proto(info: generation_pb2.FinishInfo) -> Finish:
    """Convert the end of a choice."""
    matched = info.WhichOneof("matched")
    return Finish(
        reason=enum_name(generation_pb2.FinishReason.DESCRIPTOR, info.reason),
        eos_token_id=info.eos_token_id if matched == "eos_token_id" else None,
        stop_token_id=info.stop_token_id if matched == "stop_token_id" else None,
        stop_string=info.stop_string if matched == "stop_string" else None,
        usage=Usage(
            num_prompt_tokens=info.usage.num_prompt_tokens,
            num_generated_tokens=info.usage.num_generated_tokens,
            num_cached_tokens=info.usage.num_cached_tokens,
            num_draft_tokens=info.usage.num_draft_tokens,
            num_accepted_tokens=info.usage.num_accepted_tokens,
        ),
        timings=Timings(
            queue_s=_seconds(info.timings.queue),
            prefill_s=_seconds(info.timings.prefill),
            decode_s=_seconds(info.timings.decode),
        ),
        weight_version=info.weight_version,
    )


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)


def generation_from_proto(response: generation_pb2.GenerateResponse) -> Generation:
    """Convert the answer of `generate`."""
    choices = [
        Choice(
            index=choice.index,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            logprobs=_logprobs(choice.logprobs),
            finish=finish_from_proto(choice.finish_info),
        )
        for choice in response.choices
    ]
    return Generation(prompt_info=prompt_info_from_proto(response.prompt_info), choices=tuple(choices))


def score_from_proto(response: generation_pb2.ScoreResponse) -> Score:
    """Convert the answer of `score`."""
    return Score(
        model=response.model,
        weight_version=response.weight_version,
        raw_logprobs=_logprobs(response.raw_logprobs),
        total_logprob=response.total_logprob,
        adapter_version=response.adapter_version,
    )


def tokens_from_proto(response: generation_pb2.TokenizeResponse) -> tuple[Token, ...]:
    """Convert the answer of `tokenize`."""
    return tuple(Token(id=t.id, token=t.token, start=t.start, end=t.end) for t in response.tokens)


def model_from_proto(model: model_pb2.Model) -> Model:
    """Convert a served model."""
    return Model(
        name=model.name,
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        num_parameters=model.num_parameters,
        dtype=model.dtype,
        backend=model.backend,
        numerics=model.numerics,
        weight_version=model.weight_version,
        bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else None,
        eos_token_ids=tuple(model.eos_token_ids),
        has_chat_template=model.has_chat_template,
        default_knobs=values_from_proto(model.default_knobs),
        weight_label=model.weight_label,
    )


def adapter_from_proto(adapter: model_pb2.Adapter) -> Adapter:
    """Convert a loaded adapter."""
    return Adapter(name=adapter.name, model=adapter.model, version=adapter.version, rank=adapter.rank)


def models_from_proto(response: model_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """Convert the answer of `list_models`."""
    return tuple(model_from_proto(model) for model in response.models)


def samplers_from_proto(response: sampler_pb2.ListSamplersResponse) -> Samplers:
    """Convert the answer of `list_samplers`."""
    samplers = tuple(_sampler(sampler) for sampler in response.samplers)
    return Samplers(samplers=samplers, plugins=tuple(_plugin(plugin) for plugin in response.plugins))


def _sampler(sampler: sampler_pb2.Sampler) -> Sampler:
    return Sampler(
        name=sampler.name,
        kind=enum_name(sampler_pb2.SamplerKind.DESCRIPTOR, sampler.kind),
        plugin=sampler.plugin,
        parameters_json_schema=sampler.parameters_json_schema,
        summary=sampler.summary,
        num_slow_calls=sampler.num_slow_calls,
    )


def _plugin(plugin: sampler_pb2.Plugin) -> Plugin:
    return Plugin(
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        status=enum_name(sampler_pb2.PluginStatus.DESCRIPTOR, plugin.status),
        reason=plugin.reason,
        stages=tuple(plugin.stages),
        families=tuple(plugin.families),
        losses=tuple(plugin.losses),
        optimizers=tuple(plugin.optimizers),
        backends=tuple(plugin.backends),
    )


def server_info_from_proto(response: server_pb2.GetServerInfoResponse) -> ServerInfo:
    """Convert the answer of `server_info`."""
    limits = response.limits
    return ServerInfo(
        version=response.version,
        protocol_version=response.protocol_version,
        capabilities=tuple(response.capabilities),
        limits=Limits(
            max_message_bytes=limits.max_message_bytes,
            max_queued_requests=limits.max_queued_requests,
            max_queued_tokens=limits.max_queued_tokens,
            max_choices=limits.max_choices,
            max_top_logprobs=limits.max_top_logprobs,
            max_stop_sequences=limits.max_stop_sequences,
            max_trace_tokens=limits.max_trace_tokens,
            max_trace_bytes=limits.max_trace_bytes,
        ),
        uptime_s=_seconds(response.uptime),
    )


def load_from_proto(response: server_pb2.GetLoadResponse) -> tuple[ModelLoad, ...]:
    """Convert the answer of `get_load`."""
    return tuple(
        ModelLoad(
            model=load.model,
            num_waiting_requests=load.num_waiting_requests,
            num_waiting_tokens=load.num_waiting_tokens,
            num_running_sequences=load.num_running_sequences,
            kv_cache_bytes=load.kv_cache_bytes,
            max_kv_cache_bytes=load.max_kv_cache_bytes,
            num_generated_tokens=load.num_generated_tokens,
            num_weight_versions=load.num_weight_versions,
            num_paused_sequences=load.num_paused_sequences,
            num_preempted_sequences=load.num_preempted_sequences,
            num_preemptions=load.num_preemptions,
            prefix_cache_bytes=load.prefix_cache_bytes,
            max_prefix_cache_bytes=load.max_prefix_cache_bytes,
            num_prefix_hit_tokens=load.num_prefix_hit_tokens,
            num_prefix_queried_tokens=load.num_prefix_queried_tokens,
        )
        for load in response.models
    )


def trace_from_proto(responses: Iterable[trace_pb2.TraceResponse]) -> Trace:
    """Join the messages of a trace."""
    info = trace_pb2.TraceInfo()
    parts: dict[str, list[trace_pb2.TensorPart]] = {}
    for response in responses:
        if response.WhichOneof("event") == "info":
            info = response.info
        else:
            parts.setdefault(response.part.name, []).append(response.part)
    return Trace(
        model=info.model,
        weight_version=info.weight_version,
        token_ids=tuple(info.token_ids),
        tokens=tuple(info.tokens),
        tensors={name: _array(found) for name, found in parts.items()},
    )


def _array(parts: Sequence[trace_pb2.TensorPart]) -> Any:
    data = b"".join(part.data for part in sorted(parts, key=lambda part: part.offset))
    return make_array(parts[0].dtype, tuple(parts[0].shape), data)


def preview_from_proto(response: trace_pb2.PreviewSamplingResponse) -> Preview:
    """Convert the answer of `preview`."""
    return Preview(
        stages=tuple(_preview_stage(stage, response.vocab_size) for stage in response.stages),
        initial=_preview_stage(response.initial, response.vocab_size),
        chosen=response.chosen_token_id,
        seed=response.seed,
        knobs=values_from_proto(response.knobs),
    )


def _preview_stage(result: trace_pb2.StageDistribution, vocab_size: int) -> PreviewStage:
    probabilities = [0.0] * vocab_size
    for token_id, probability in zip(result.kept_ids, result.probabilities, strict=True):
        probabilities[token_id] = probability
    return PreviewStage(
        stage=result.stage.name,
        parameters=values_from_proto(result.stage.parameters),
        probabilities=make_vector("float64", probabilities),
        kept=make_vector("int64", result.kept_ids),
    )
