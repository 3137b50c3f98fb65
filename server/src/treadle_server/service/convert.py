"""Between protos and the plain objects of the language model. No proto goes further than this package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import model_pb2, trace_pb2, value_pb2

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.events import FinishReason, TokenLogprob
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.speculation import Speculation
from treadle_server.engine.weights import LoadedAdapter
from treadle_server.errors import InvalidRequestError, Violation
from treadle_server.language_model import Choice, Delta, FinishInfo, GenerationSpec, LanguageModel, PromptInfo
from treadle_server.language_model.spec import Message, Prompt
from treadle_server.tokenizer import Tokenizer

# Fields of SamplingOptions that are no plain knobs of a stage.
_NOT_KNOBS = frozenset({"seed", "stages", "order", "use_model_defaults"})
_MAX_VALUE_DEPTH = 16

# Parts of a GenerationSpec whose fields are fields of ours.
_GROUPS = ("sampling", "stopping", "response")
_T = TypeVar("_T")
_PromptMessage = (
    pb.GenerationSpec | pb.NegativePrompt | pb.ScoreRequest | trace_pb2.TraceRequest | trace_pb2.PreviewSamplingRequest
)

_LOGPROBS = {
    pb.LOGPROBS_MODE_UNSPECIFIED: LogprobsMode.NONE,
    pb.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}
_SPECULATION = {
    pb.SPECULATION_MODE_UNSPECIFIED: Speculation.NONE,
    pb.SPECULATION_MODE_PROMPT_LOOKUP: Speculation.PROMPT_LOOKUP,
    pb.SPECULATION_MODE_DRAFT_MODEL: Speculation.DRAFT_MODEL,
}
_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: pb.FINISH_REASON_CONTEXT_FULL,
}


def spec_from_proto(spec: pb.GenerationSpec) -> GenerationSpec:
    """Return what a message asks for.

    Raises:
        InvalidRequestError: no prompt, or a value that no spec can hold.
    """
    stopping, response = spec.stopping, spec.response
    return GenerationSpec(
        prompt=prompt_from_proto(spec),
        adapter=spec.adapter,
        preset=spec.preset,
        use_model_defaults=_optional(spec.sampling, "use_model_defaults", True),
        max_tokens=_optional(stopping, "max_tokens", None),
        min_tokens=stopping.min_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        logprobs=_enum(_LOGPROBS, response.logprobs, "logprobs", pb.LogprobsMode),
        num_top_logprobs=response.num_top_logprobs,
        prompt_logprobs=response.prompt_logprobs,
        echo=response.echo,
        include_stop=response.include_stop,
        special_tokens=response.special_tokens,
        n=_optional(spec, "n", 1),
        best_of=_optional(spec, "best_of", None),
        guidance_scale=_optional(spec, "guidance_scale", 1.0),
        negative_prompt=prompt_from_proto(spec.negative_prompt) if spec.HasField("negative_prompt") else None,
        speculation=_enum(_SPECULATION, spec.speculation, "speculation", pb.SpeculationMode),
        num_draft_tokens=_optional(spec, "num_draft_tokens", None),
        priority=_optional(spec, "priority", 0),
        **sampling_from_proto(spec.sampling),
    )


def sampling_from_proto(sampling: pb.SamplingOptions) -> dict[str, Any]:
    """Return the chain's fields of a spec, of a generation as of a preview."""
    return {
        "knobs": {f.name: _plain(value) for f, value in sampling.ListFields() if f.name not in _NOT_KNOBS},
        "seed": _optional(sampling, "seed", None),
        "stages": tuple(_stage_from_proto(index, stage) for index, stage in enumerate(sampling.stages)),
        "order": tuple(sampling.order),
    }


def _plain(value: Any) -> Any:
    """Return a knob's value as Python has it; a message stands for its only field, a list or a map."""
    if isinstance(value, ProtoMessage):
        value = getattr(value, value.DESCRIPTOR.fields[0].name)
        return dict(value) if isinstance(value, Mapping) else [_plain(item) for item in value]
    return value


@contextmanager
def proto_paths(request: _PromptMessage) -> Iterator[None]:
    """Let errors name the fields of the message: `top_p` is `sampling.top_p` there, `prompt[3]` is `token_ids[3]`."""
    try:
        yield
    except InvalidRequestError as error:
        violations = [Violation(_proto_path(v.field, request), v.message) for v in error.violations]
        raise InvalidRequestError(violations) from error


def _proto_path(field: str, request: _PromptMessage) -> str:
    end = min((field.find(mark) for mark in "[." if mark in field), default=len(field))
    name, rest = field[:end], field[end:]
    if name == "prompt":
        return (request.WhichOneof("prompt") or name) + rest
    for group in _GROUPS:
        found = request.DESCRIPTOR.fields_by_name.get(group)
        if found is not None and found.message_type is not None and name in found.message_type.fields_by_name:
            return f"{group}.{name}{rest}"
    return name + rest


def _optional(message: Any, field: str, default: Any) -> Any:
    return getattr(message, field) if message.HasField(field) else default


def _enum(meanings: Mapping[Any, _T], value: Any, field: str, kind: Any) -> _T:
    """Return what an enum's value means, or refuse a number that has no name."""
    if value not in meanings:
        raise InvalidRequestError.of(field, f"must be one of {', '.join(kind.keys())}, got {value}")
    return meanings[value]


def prompt_from_proto(message: _PromptMessage) -> Prompt:
    """Return the prompt of a message in whichever form it came."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        forms = [field.name for field in message.DESCRIPTOR.oneofs_by_name["prompt"].fields]
        raise InvalidRequestError.of("prompt", f"must be set, one of: {', '.join(forms)}")
    if kind == "token_ids":
        return list(message.token_ids.ids)
    return message.text if kind == "text" else _messages_from_proto(message.messages)


def input_from_proto(message: pb.TokenizeRequest) -> str | list[Message]:
    """Return what a message asks to tokenise."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError.of("input", "must be set: a text or messages")
    return message.text if kind == "text" else _messages_from_proto(message.messages)


def _messages_from_proto(messages: pb.Messages) -> list[Message]:
    if not messages.messages:
        raise InvalidRequestError.of("messages", "must have at least one message")
    return [{"role": message.role, "content": message.content} for message in messages.messages]


def _stage_from_proto(index: int, stage: pb.Stage) -> StageSpec:
    field = f"stages[{index}]"
    parameters = {
        name: value_from_proto(value, f"{field}.parameters.{name}") for name, value in stage.parameters.items()
    }
    return StageSpec(stage.name, parameters)


def value_from_proto(value: value_pb2.Value, field: str, depth: int = 0) -> object:
    """Return a typed value as bool, int, float, str, list or dict; `field` names it in an error."""
    if depth > _MAX_VALUE_DEPTH:
        raise InvalidRequestError.of(field, f"must be nested at most {_MAX_VALUE_DEPTH} deep")
    kind = value.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError.of(field, "has no value")
    if kind == "list_value":
        return [value_from_proto(v, f"{field}[{i}]", depth + 1) for i, v in enumerate(value.list_value.values)]
    if kind == "map_value":
        items = value.map_value.values.items()
        return {name: value_from_proto(v, f"{field}.{name}", depth + 1) for name, v in items}
    return getattr(value, kind)


def value_to_proto(value: object) -> value_pb2.Value:
    """Return a typed value message; None and foreign types become their text."""
    if isinstance(value, bool):
        return value_pb2.Value(bool_value=value)
    if isinstance(value, int):
        return value_pb2.Value(int_value=value)
    if isinstance(value, float):
        return value_pb2.Value(double_value=value)
    if isinstance(value, Mapping):
        items = {str(name): value_to_proto(v) for name, v in value.items()}
        return value_pb2.Value(map_value=value_pb2.ValueMap(values=items))
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return value_pb2.Value(list_value=value_pb2.ValueList(values=[value_to_proto(v) for v in value]))
    return value_pb2.Value(string_value=str(value))


def values_to_proto(values: Mapping[str, object]) -> dict[str, value_pb2.Value]:
    """Return named values as messages; those that are None are left out."""
    return {name: value_to_proto(value) for name, value in values.items() if value is not None}


def stage_to_proto(name: str, parameters: Mapping[str, object]) -> pb.Stage:
    """Return a stage with its parameters as a message."""
    return pb.Stage(name=name, parameters=values_to_proto(parameters))


def prompt_info_to_proto(info: PromptInfo, tokenizer: Tokenizer, *, token_ids: bool) -> pb.PromptInfo:
    """Return the first message of a stream."""
    return pb.PromptInfo(
        request_id=info.request_id,
        model=info.model,
        weight_version=info.weight_version,
        adapter=info.adapter,
        adapter_version=info.adapter_version,
        num_prompt_tokens=len(info.prompt_ids),
        max_tokens=info.max_tokens,
        seed=info.seed,
        knobs=values_to_proto(info.knobs),
        chain=[stage_to_proto(stage.name, stage.parameters) for stage in info.chain],
        prompt_token_ids=info.prompt_ids if token_ids else (),
        prompt_logprobs=logprobs_to_proto(info.prompt_logprobs, tokenizer),
    )


def logprobs_to_proto(logprobs: Iterable[TokenLogprob], tokenizer: Tokenizer) -> list[pb.TokenLogprob]:
    """Return log-probabilities with the bytes of their tokens."""
    return [
        pb.TokenLogprob(
            token_id=item.token_id,
            token=tokenizer.token_bytes(item.token_id),
            logprob=item.logprob,
            rank=item.rank,
            top=[pb.TopLogprob(token_id=i, token=tokenizer.token_bytes(i), logprob=p) for i, p in item.top],
        )
        for item in logprobs
    ]


def delta_to_proto(delta: Delta, tokenizer: Tokenizer, *, token_ids: bool) -> pb.GenerateStreamResponse:
    """Return the message of new text and tokens of a choice; every token has one, so it is filled in place."""
    response = pb.GenerateStreamResponse()
    message = response.delta
    message.index, message.text = delta.index, delta.text
    if token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(logprobs_to_proto(delta.logprobs, tokenizer))
    return response


def finish_info_to_proto(info: FinishInfo) -> pb.FinishInfo:
    """Return the end of a choice."""
    message = pb.FinishInfo(
        index=info.index,
        reason=_REASONS[info.reason],
        usage=pb.Usage(
            num_prompt_tokens=info.num_prompt_tokens,
            num_generated_tokens=info.num_generated_tokens,
            num_cached_tokens=info.num_cached_tokens,
            num_draft_tokens=info.num_draft_tokens,
            num_accepted_tokens=info.num_accepted_tokens,
        ),
        timings=pb.Timings(
            queue=duration_to_proto(info.timings.queue_s),
            prefill=duration_to_proto(info.timings.prefill_s),
            decode=duration_to_proto(info.timings.decode_s),
        ),
        weight_version=info.weight_version,
    )
    if isinstance(info.matched, str):
        message.stop_string = info.matched
    elif info.matched is not None and info.reason is FinishReason.EOS:
        message.eos_token_id = info.matched
    elif info.matched is not None:
        message.stop_token_id = info.matched
    return message


def choice_to_proto(choice: Choice, tokenizer: Tokenizer, *, token_ids: bool) -> pb.Choice:
    """Return a finished choice."""
    return pb.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids if token_ids else (),
        logprobs=logprobs_to_proto(choice.logprobs, tokenizer),
        finish_info=finish_info_to_proto(choice.finish),
    )


def duration_to_proto(seconds: float) -> Duration:
    """Return a duration in seconds as a message."""
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def model_to_proto(model: LanguageModel) -> model_pb2.Model:
    """Return the description of a served model."""
    return model_pb2.Model(
        name=model.name,
        model_type=model.config.model_type,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        num_parameters=model.num_parameters,
        dtype=str(model.decoder.dtype),
        backend=model.decoder.backend.name,
        numerics=model.decoder.numerics,
        weight_version=model.weight_version,
        weight_label=model.weight_label,
        bos_token_id=model.tokenizer.bos_token_id,
        eos_token_ids=sorted(model.eos_ids),
        has_chat_template=model.tokenizer.chat_template is not None,
        default_knobs=values_to_proto(model.default_knobs),
    )


def adapter_to_proto(adapter: LoadedAdapter, model: str) -> model_pb2.Adapter:
    """Return the description of an adapter of the named model."""
    return model_pb2.Adapter(name=adapter.name, model=model, version=adapter.version, rank=adapter.rank)
