"""Refuses a request's wrong fields before anything is built from them. One table holds every message."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.speculation import Speculation
from treadle_server.errors import InvalidRequestError, Violation
from treadle_server.language_model.presets import PRESETS
from treadle_server.language_model.spec import GenerationSpec, PreviewSpec

MAX_COUNT = 2**31 - 1
# Named stages of a request, and names in an order.
MAX_STAGES = 64
MAX_GUIDANCE_SCALE = 100
MAX_DRAFT_TOKENS = 32
MAX_PRIORITY = 100
# Patterns of a trace, and characters of one.
MAX_PATTERNS = 256
MAX_PATTERN_LENGTH = 256
MAX_LABEL_LENGTH = 256
# Names that models and adapters get while the server runs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,95}")
# Characters of a value in a message.
_LONGEST_SHOWN = 200

MESSAGES = {
    "integer": "must be an integer, got {value!r}",
    "range": "must be in [{low}, {high}], got {value}",
    "min_tokens": "must not exceed max_tokens ({max_tokens}), got {value}",
    "name": "must be 1 to 96 letters, digits and '._:/@+-', beginning with a letter or digit, got {value!r}",
    "list": "must be a list, got {value!r}",
    "boolean": "must be true or false, got {value!r}",
    "text": "must be a text, got {value!r}",
    "stop_empty": "must not be empty: an empty text is found everywhere",
    "too_long": "must have at most {limit} characters, got {value}",
    "too_many": "must have at most {limit} entries, got {value}",
    "vocabulary": "token id {value} is outside the vocabulary [0, {vocab_size})",
    "best_of_stream": "is refused for streams: which are the best is known only when all have ended; got {value}",
    "best_of_small": "must be at least n ({n}), got {value}",
    "best_of_logprobs": "ranks by raw log-probabilities, so it goes with raw ones or none, not with processed ones",
    "number": "must be a number in [{low}, {high}], got {value}",
    "needs_guidance": "needs a guidance_scale other than 1",
    "needs_speculation": "needs speculation to be asked for, got {value}",
    "guided_speculation": "cannot be combined with guidance_scale",
    "no_draft_model": "needs a server that was started with a draft model for this model",
    "preset": "there is no preset {value!r}; presets are: {known}",
    "adapter": "there is no adapter {value!r}; loaded adapters: {known}",
    "top_needs_logprobs": "needs logprobs or prompt_logprobs to be asked for, got {value}",
    "prompt_type": "must be a text, a list of token ids or a list of messages, got {value!r}",
    "text_or_messages": "must be a text or a list of messages, got {value!r}",
    "prompt_mixed": "must be all token ids or all messages; entry {index} is {value!r}",
    "message": 'must have the texts "role" and "content", got {value!r}',
    "kv_memory": "needs {value} bytes of keys and values for its {tokens} tokens; the server's limit is {limit} bytes",
    "answer_size": "can make an answer of {value} bytes, over the limit of {limit}; ask for fewer, or stream",
    "prompt_empty": "is empty, and the model has no beginning-of-sequence token to start from",
    "messages_empty": "must have at least one message",
    "no_template": "the model has no chat template; send a text or token ids",
    "context": "has {value} tokens; there is room for {room}: the model's context is {limit} tokens, answer included",
    "context_at_least": "has at least {value} tokens; there is room for {room}",
    "utf8": "is not valid Unicode: {value}",
    "trace_tokens": "has {value} tokens; a trace takes at most {limit}",
    "trace_bytes": "selects {value} bytes; a trace gives out at most {limit}: name fewer layers or intermediates",
    "trace_unknown": "{value!r} names no intermediate; there are: {known}",
    "trace_nothing": "names nothing that is in the layers {layers}",
    "prompt_or_logits": "must be given, or else logits: one of the two",
    "logits_only": "goes with logits; a prompt brings its own",
    "prompt_only": "goes with a prompt: given logits are made already",
    "logits_shape": "must be a list of numbers, at least one, got an array of shape {shape} and type {dtype}",
    "logits_vocabulary": "must have {vocab_size} values, the vocabulary of model {model!r}, got {value}",
    "logit": "must be a finite number in the range of float32, or -inf for a masked token, got {value}",
    "logits_masked": "must have at least one finite value, got only masked tokens",
    "preview_size": "make distributions of {value} bytes or more together; a preview gives out at most {limit}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on one request.

    Attributes:
        max_choices: largest n.
        max_top_logprobs: largest num_top_logprobs.
        max_stop_sequences: largest number of stop strings, and of stop token ids.
        max_stop_length: largest number of characters of a stop string.
        max_trace_tokens: largest number of tokens of a traced prompt; they run in one step, which nothing interrupts.
        max_trace_bytes: largest size of all intermediates of a trace together, in bytes.
    """

    max_choices: int = 128
    max_top_logprobs: int = 128
    max_stop_sequences: int = 64
    max_stop_length: int = 1024
    max_trace_tokens: int = 512
    max_trace_bytes: int = 256 << 20


def violation(field: str, key: str, **values: object) -> Violation:
    """Make a violation from the table of messages; what was sent, `value`, is shown short."""
    if "value" in values:
        values["value"] = _Shown(values["value"])
    return Violation(field, MESSAGES[key].format(**values))


class _Shown:
    """A value in a message: cut short, and a number of more digits than Python prints told by its size."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, int) and self._value.bit_length() > _LONGEST_SHOWN:
            return f"an integer of {self._value.bit_length()} bits"
        try:
            return _cut(repr(self._value))
        except Exception:  # noqa: BLE001 - a foreign object's repr, or an integer within one
            return f"a {type(self._value).__name__}"

    def __format__(self, spec: str) -> str:
        return _cut(self._value) if isinstance(self._value, str) else repr(self)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def refuse(field: str, key: str, **values: object) -> InvalidRequestError:
    """Make the error for one field from the table of messages."""
    return InvalidRequestError([violation(field, key, **values)])


@contextmanager
def renamed_field(old: str, new: str) -> Iterator[None]:
    """Let errors about the field `old` name it `new`."""
    try:
        yield
    except InvalidRequestError as error:
        renamed = [Violation(v.field.replace(old, new, 1), v.message) for v in error.violations]
        raise InvalidRequestError(renamed) from error


def check_spec(spec: GenerationSpec, limits: RequestLimits, vocab_size: int) -> None:
    """Check everything about a request that needs neither its tokens nor its sampling chain.

    Raises:
        InvalidRequestError: with one violation for each wrong field.
    """
    violations = list(_violations(spec, limits, vocab_size))
    if violations:
        raise InvalidRequestError(violations)


def _violations(spec: GenerationSpec, limits: RequestLimits, vocab_size: int) -> Iterator[Violation]:
    yield from _integer("n", spec.n, 1, limits.max_choices)
    yield from _integer("priority", spec.priority, -MAX_PRIORITY, MAX_PRIORITY)
    yield from _integer("seed", 0 if spec.seed is None else spec.seed, 0, 2**64 - 1)
    yield from _integer("max_tokens", 1 if spec.max_tokens is None else spec.max_tokens, 1, MAX_COUNT)
    yield from _integer("min_tokens", spec.min_tokens, 0, MAX_COUNT)
    if _is_integer(spec.max_tokens) and _is_integer(spec.min_tokens) and spec.min_tokens > (spec.max_tokens or 0) > 0:
        yield violation("min_tokens", "min_tokens", max_tokens=spec.max_tokens, value=spec.min_tokens)
    yield from _top_logprobs(spec, limits)
    yield from _stop(spec.stop, limits)
    yield from _stop_token_ids(spec.stop_token_ids, limits, vocab_size)
    yield from _stages(spec)
    for name in ("use_model_defaults", "ignore_eos", "prompt_logprobs", "echo", "include_stop", "special_tokens"):
        if not isinstance(getattr(spec, name), bool):
            yield violation(name, "boolean", value=getattr(spec, name))
    yield from _guidance(spec)
    yield from _speculation(spec)
    if spec.best_of is not None:  # whoever answers at once has replaced it by now
        yield violation("best_of", "best_of_stream", value=spec.best_of)
    yield from _preset(spec.preset)
    if not isinstance(spec.adapter, str):
        yield violation("adapter", "text", value=spec.adapter)


def check_name(field: str, name: str) -> None:
    """Refuse a name that nobody could type or log: models and adapters get theirs by RPC."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(field, "name", value=name)


def check_label(label: str) -> None:
    """Refuse a label of a weight version that no list could show."""
    violations = list(_text("label", label, MAX_LABEL_LENGTH))
    if violations:
        raise InvalidRequestError(violations)


def check_lists(**values: object) -> None:
    """Refuse arguments that are no lists."""
    violations = [violation(name, "list", value=value) for name, value in values.items() if not is_list(value)]
    if violations:
        raise InvalidRequestError(violations)


def check_best_of(spec: GenerationSpec, limits: RequestLimits) -> None:
    """Refuse a best_of that is out of range, or that cannot rank."""
    if spec.best_of is None:
        return
    violations = list(_integer("best_of", spec.best_of, 1, limits.max_choices))
    if not violations and _is_integer(spec.n) and spec.best_of < spec.n:
        violations.append(violation("best_of", "best_of_small", n=spec.n, value=spec.best_of))
    if spec.logprobs is LogprobsMode.PROCESSED:
        violations.append(violation("best_of", "best_of_logprobs"))
    if violations:
        raise InvalidRequestError(violations)


def _guidance(spec: GenerationSpec) -> Iterator[Violation]:
    if not is_finite_number(spec.guidance_scale) or not 0 <= spec.guidance_scale <= MAX_GUIDANCE_SCALE:
        yield violation("guidance_scale", "number", low=0, high=MAX_GUIDANCE_SCALE, value=spec.guidance_scale)
    elif spec.guidance_scale == 1 and spec.negative_prompt is not None:
        yield violation("negative_prompt", "needs_guidance")


def _speculation(spec: GenerationSpec) -> Iterator[Violation]:
    if spec.num_draft_tokens is not None:
        yield from _integer("num_draft_tokens", spec.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if spec.speculation is Speculation.NONE:
            yield violation("num_draft_tokens", "needs_speculation", value=spec.num_draft_tokens)
    if spec.speculation is not Speculation.NONE and spec.guidance_scale != 1:
        yield violation("speculation", "guided_speculation")


def _preset(preset: str) -> Iterator[Violation]:
    if not isinstance(preset, str):
        yield violation("preset", "text", value=preset)
    elif preset and preset not in PRESETS:
        yield violation("preset", "preset", value=preset, known=", ".join(PRESETS))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(field: str, value: object, low: int, high: int) -> Iterator[Violation]:
    if not isinstance(value, int) or isinstance(value, bool):
        yield violation(field, "integer", value=value)
    elif not low <= value <= high:
        yield violation(field, "range", low=low, high=high, value=value)


def check_top_logprobs(value: int, limits: RequestLimits) -> None:
    """Refuse a number of listed tokens that is out of range."""
    violations = list(_integer("num_top_logprobs", value, 0, limits.max_top_logprobs))
    if violations:
        raise InvalidRequestError(violations)


def _top_logprobs(spec: GenerationSpec, limits: RequestLimits) -> Iterator[Violation]:
    yield from _integer("num_top_logprobs", spec.num_top_logprobs, 0, limits.max_top_logprobs)
    wants_logprobs = spec.logprobs is not LogprobsMode.NONE or spec.prompt_logprobs
    if _is_integer(spec.num_top_logprobs) and spec.num_top_logprobs > 0 and not wants_logprobs:
        yield violation("num_top_logprobs", "top_needs_logprobs", value=spec.num_top_logprobs)


def is_list(value: object) -> bool:
    """Tell whether a value is a list or another sequence, and no text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _stages(spec: GenerationSpec | PreviewSpec) -> Iterator[Violation]:
    for name, entries in (("stages", spec.stages), ("order", spec.order)):
        if not is_list(entries):
            yield violation(name, "list", value=entries)
        elif len(entries) > MAX_STAGES:
            yield violation(name, "too_many", limit=MAX_STAGES, value=len(entries))
        else:
            kind = str if name == "order" else StageSpec
            wrong = [(i, entry) for i, entry in enumerate(entries) if not isinstance(entry, kind)]
            yield from (violation(f"{name}[{i}]", "text", value=entry) for i, entry in wrong)


def _stop_token_ids(ids: Sequence[int], limits: RequestLimits, vocab_size: int) -> Iterator[Violation]:
    if not is_list(ids):
        yield violation("stop_token_ids", "list", value=ids)
    elif len(ids) > limits.max_stop_sequences:
        yield violation("stop_token_ids", "too_many", limit=limits.max_stop_sequences, value=len(ids))
    else:
        yield from token_id_violations("stop_token_ids", ids, vocab_size)


def _stop(stop: Sequence[str], limits: RequestLimits) -> Iterator[Violation]:
    if not is_list(stop):
        yield violation("stop", "list", value=stop)
        return
    if len(stop) > limits.max_stop_sequences:
        yield violation("stop", "too_many", limit=limits.max_stop_sequences, value=len(stop))
        return
    for index, text in enumerate(stop):
        field = f"stop[{index}]"
        if text == "":
            yield violation(field, "stop_empty")
        yield from _text(field, text, limits.max_stop_length)


def token_id_violations(field: str, ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    """Yield a violation for the first id that is no integer in [0, vocab_size)."""
    for index, token_id in enumerate(ids):
        if not _is_integer(token_id):
            yield violation(f"{field}[{index}]", "integer", value=token_id)
            return
        if not 0 <= token_id < vocab_size:
            yield violation(f"{field}[{index}]", "vocabulary", value=token_id, vocab_size=vocab_size)
            return


def is_unicode(text: str) -> bool:
    """Tell whether a text can be UTF-8: whether it is free of lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_finite_number(value: object) -> bool:
    """Tell whether a value is a finite int or float, and no bool."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer past the largest float
        return False


def check_trace(
    num_tokens: int, layers: Sequence[int], what: Sequence[str], num_layers: int, limits: RequestLimits
) -> None:
    """Refuse a trace of too many tokens, of layers that the model does not have, or of no names.

    Raises:
        InvalidRequestError: with one violation for each wrong field.
    """
    violations: list[Violation] = []
    if num_tokens > limits.max_trace_tokens:
        violations.append(violation("prompt", "trace_tokens", value=num_tokens, limit=limits.max_trace_tokens))
    for name, entries, limit in (("layers", layers, num_layers), ("what", what, MAX_PATTERNS)):
        if len(entries) > limit:
            raise refuse(name, "too_many", limit=limit, value=len(entries))
    for index, layer in enumerate(layers):
        violations += _integer(f"layers[{index}]", layer, 0, num_layers - 1)
    for index, pattern in enumerate(what):
        violations += _text(f"what[{index}]", pattern, MAX_PATTERN_LENGTH)
    if violations:
        raise InvalidRequestError(violations)


def _text(field: str, text: object, limit: int) -> Iterator[Violation]:
    if not isinstance(text, str):
        yield violation(field, "text", value=text)
    elif len(text) > limit:
        yield violation(field, "too_long", limit=limit, value=len(text))
    elif not is_unicode(text):
        yield violation(field, "utf8", value="it holds a lone surrogate")


def check_trace_size(num_bytes: int, limits: RequestLimits) -> None:
    """Refuse a trace whose intermediates are too large together."""
    if num_bytes > limits.max_trace_bytes:
        raise refuse("what", "trace_bytes", value=num_bytes, limit=limits.max_trace_bytes)


def check_preview_source(spec: PreviewSpec) -> None:
    """Refuse a preview that starts from nothing or from two things."""
    if (spec.prompt is None) == (spec.logits is None):
        raise refuse("prompt", "prompt_or_logits")
    if spec.prompt is not None and len(spec.prompt_ids):
        raise refuse("prompt_ids", "logits_only")
    if spec.prompt is None and spec.adapter:
        raise refuse("adapter", "prompt_only")


def check_preview(spec: PreviewSpec, vocab_size: int, context_length: int) -> None:
    """Check everything about a preview but its prompt, its logits and its sampling chain.

    Raises:
        InvalidRequestError: with one violation for each wrong field.
    """
    num_tokens = len(spec.prompt_ids) + len(spec.output_ids)
    if num_tokens >= context_length:
        field = "prompt_ids" if spec.prompt is None else "prompt"
        raise refuse(field, "context", value=num_tokens, room=context_length - 1, limit=context_length)
    violations = [*_integer("seed", 0 if spec.seed is None else spec.seed, 0, 2**64 - 1), *_preset(spec.preset)]
    violations += _stages(spec)
    for name in ("prompt_ids", "output_ids", "eos_ids", "stop_token_ids"):
        violations += token_id_violations(name, getattr(spec, name), vocab_size)
    if violations:
        raise InvalidRequestError(violations)
