"""Refuses a request's wrong fields before anything is built from them. One table holds every message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle_server.engine.request import LogprobsMode
from treadle_server.errors import InvalidRequestError, Violation
from treadle_server.language_model.presets import PRESETS
from treadle_server.language_model.spec import GenerationSpec

MAX_COUNT = 2**31 - 1

MESSAGES = {
    "integer": "must be an integer, got {value!r}",
    "range": "must be in [{low}, {high}], got {value}",
    "min_tokens": "must not exceed max_tokens ({max_tokens}), got {value}",
    "boolean": "must be true or false, got {value!r}",
    "text": "must be a text, got {value!r}",
    "stop_empty": "must not be empty: an empty text is found everywhere",
    "too_many": "must have at most {limit} entries, got {value}",
    "vocabulary": "token id {value} is outside the vocabulary [0, {vocab_size})",
    "preset": "there is no preset {value!r}; presets are: {known}",
    "adapter": "there is no adapter {value!r}; no adapters are loaded",
    "top_needs_logprobs": "needs logprobs or prompt_logprobs to be asked for, got {value}",
    "prompt_type": "must be a text, a list of token ids or a list of messages, got {value!r}",
    "prompt_mixed": "must be all token ids or all messages; entry {index} is {value!r}",
    "message": 'must have the texts "role" and "content", got {value!r}',
    "prompt_empty": "is empty, and the model has no beginning-of-sequence token to start from",
    "messages_empty": "must have at least one message",
    "no_template": "the model has no chat template; send a text or token ids",
    "context": "has {value} tokens; the model's context is {limit} tokens, answer included",
    "context_at_least": "has at least {value} tokens; the model's context is {limit} tokens, answer included",
    "utf8": "is not valid Unicode: {value}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on one request.

    Attributes:
        max_choices: largest n.
        max_top_logprobs: largest num_top_logprobs.
        max_stop_sequences: largest number of stop strings, and of stop token ids.
        max_stop_length: largest number of characters of a stop string.
    """

    max_choices: int = 128
    max_top_logprobs: int = 128
    max_stop_sequences: int = 64
    max_stop_length: int = 1024


def violation(field: str, key: str, **values: object) -> Violation:
    """Make a violation from the table of messages."""
    return Violation(field, MESSAGES[key].format(**values))


def refuse(field: str, key: str, **values: object) -> InvalidRequestError:
    """Make the error for one field from the table of messages."""
    return InvalidRequestError([violation(field, key, **values)])


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
    yield from _integer("seed", 0 if spec.seed is None else spec.seed, 0, 2**64 - 1)
    yield from _integer("max_tokens", 1 if spec.max_tokens is None else spec.max_tokens, 1, MAX_COUNT)
    yield from _integer("min_tokens", spec.min_tokens, 0, MAX_COUNT)
    if _is_integer(spec.max_tokens) and _is_integer(spec.min_tokens) and spec.min_tokens > (spec.max_tokens or 0) > 0:
        yield violation("min_tokens", "min_tokens", max_tokens=spec.max_tokens, value=spec.min_tokens)
    yield from _top_logprobs(spec, limits)
    yield from _stop(spec.stop, limits)
    yield from token_id_violations("stop_token_ids", spec.stop_token_ids, vocab_size)
    if len(spec.stop_token_ids) > limits.max_stop_sequences:
        yield violation("stop_token_ids", "too_many", limit=limits.max_stop_sequences, value=len(spec.stop_token_ids))
    for name in ("use_model_defaults", "ignore_eos", "prompt_logprobs", "echo", "include_stop", "special_tokens"):
        if not isinstance(getattr(spec, name), bool):
            yield violation(name, "boolean", value=getattr(spec, name))
    if spec.preset and spec.preset not in PRESETS:
        yield violation("preset", "preset", value=spec.preset, known=", ".join(PRESETS))
    if spec.adapter:
        yield violation("adapter", "adapter", value=spec.adapter)


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
    if spec.num_top_logprobs and spec.logprobs is LogprobsMode.NONE and not spec.prompt_logprobs:
        yield violation("num_top_logprobs", "top_needs_logprobs", value=spec.num_top_logprobs)


def _stop(stop: Sequence[str], limits: RequestLimits) -> Iterator[Violation]:
    if len(stop) > limits.max_stop_sequences:
        yield violation("stop", "too_many", limit=limits.max_stop_sequences, value=len(stop))
    for index, text in enumerate(stop):
        field = f"stop[{index}]"
        if not isinstance(text, str):
            yield violation(field, "text", value=text)
        elif not text:
            yield violation(field, "stop_empty")
        elif len(text) > limits.max_stop_length:
            yield violation(field, "too_many", limit=f"{limits.max_stop_length} character", value=len(text))


def token_id_violations(field: str, ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    """Yield a violation for the first id that is no integer in [0, vocab_size)."""
    for index, token_id in enumerate(ids):
        if not _is_integer(token_id):
            yield violation(f"{field}[{index}]", "integer", value=token_id)
            return
        if not 0 <= token_id < vocab_size:
            yield violation(f"{field}[{index}]", "vocabulary", value=token_id, vocab_size=vocab_size)
            return


def is_finite_number(value: object) -> bool:
    """Tell whether a value is a finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
