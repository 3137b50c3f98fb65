"""The keywords of a generation and of a preview, and the one place that turns them into messages.

A keyword is a field of the message or of one of its groups, by the same name; its type and range come from the proto.
So a new plain knob is one field in the proto and one line in `ChainOptions`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypedDict

from treadle_protos.v1.generation_pb2 import GenerationSpec
from treadle_protos.v1.trace_pb2 import PreviewSamplingRequest

from treadle_client._exceptions import InvalidArgumentError, Violation
from treadle_client._fields import refuse, set_field, to_items, to_text, to_token_ids, to_value
from treadle_client._models import Message, Stage

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, str]]
StageLike: TypeAlias = str | tuple[str, Mapping[str, object]] | Stage


class ChainOptions(TypedDict, total=False):
    """Keywords of everything that runs a sampling chain."""

    model: str | None  # name of a served model; may be left out when the server has one only
    adapter: str | None  # name of a loaded adapter
    preset: str | None  # name of a preset of sampling settings
    temperature: float | None  # 0 or more; 0 chooses the most likely token
    top_k: int | None  # keeps the k most likely tokens; 0 and -1 keep all
    top_p: float | None  # in (0, 1]; keeps the smallest set of tokens with at least this probability
    min_p: float | None  # in [0, 1]; keeps the tokens at least this share as likely as the most likely one
    typical_p: float | None  # in (0, 1]; keeps the smallest set of typical tokens with at least this probability
    top_n_sigma: float | None  # 0 or more; keeps the logits within so many standard deviations of the largest
    top_a: float | None  # in [0, 1]; keeps the tokens with at least this times the squared largest probability
    top_h: float | None  # in [0, 1]; keeps the most likely tokens up to this share of the entropy
    tfs: float | None  # in [0, 1]; cuts the tail past this share of the curvature
    p_less: bool | None  # keeps the tokens at least as likely as two draws are to agree
    epsilon_cutoff: float | None  # in [0, 1]; keeps the tokens of at least this probability
    eta_cutoff: float | None  # in [0, 1]; the same, less where the entropy is high
    xtc_probability: float | None  # in [0, 1]; how often the top choices but the least likely are dropped
    xtc_threshold: float | None  # in [0, 0.5]; probability that makes a token a top choice
    dynatemp_range: float | None  # 0 or more; how far the temperature moves up and down with the entropy
    dynatemp_exponent: float | None  # in [0, 100]; exponent on the entropy
    repetition_penalty: float | None  # above 0; divides the logits of tokens in prompt and output, 1 changes nothing
    presence_penalty: float | None  # in [-2, 2]; taken off the logits of tokens in the output
    frequency_penalty: float | None  # in [-2, 2]; taken off for each time
    dry_multiplier: float | None  # in [0, 1000]; taken off the logit of a token that would repeat a passage
    dry_base: float | None  # in [1, 100]; factor on that for each token more
    dry_allowed_length: int | None  # 1 or more tokens in the shortest passage that counts
    dry_sequence_breakers: Sequence[str] | None  # texts that no passage reaches over
    dry_sequence_breaker_ids: Sequence[int] | None  # tokens that no passage reaches over
    no_repeat_ngram_size: int | None  # 0 or more; number of tokens that may not come twice in a row of as many
    logit_bias: Mapping[int, float] | None  # added to the logits of single tokens, each in [-100, 100]
    allowed_token_ids: Sequence[int] | None  # the only tokens that may come; one at least
    bad_words: Sequence[str] | None  # texts that may not come
    bad_words_token_ids: Sequence[Sequence[int]] | None  # sequences of tokens that may not come
    suppress_tokens: Sequence[int] | None  # tokens that may not come
    mirostat: int | None  # 0, 1 or 2; version of Mirostat to draw with
    mirostat_tau: float | None  # in [0, 100]; surprise that Mirostat aims at, in bits
    mirostat_eta: float | None  # in [0, 1]; how fast Mirostat follows
    adaptive_target: float | None  # in [0, 1], or -1 for off; mean probability that Adaptive-P aims at
    adaptive_decay: float | None  # in [0, 0.99]; how slowly Adaptive-P forgets
    seed: int | None  # 0 to 2**64 - 1; drawn by the server when unset, and returned
    stages: Sequence[StageLike] | None  # stages added by name: names, (name, parameters) pairs or Stage objects
    order: Sequence[str] | None  # names of all stages of the chain, in the order to run them
    min_tokens: int | None  # 0 or more tokens before which nothing ends the choice
    stop_token_ids: Sequence[int] | None  # tokens that end the choice


class GenerationOptions(ChainOptions, total=False):
    """Keywords of `stream` and `generate`; one left out or None is unset and takes the server's default."""

    use_model_defaults: bool | None  # whether unset knobs take the model's own defaults; true when unset
    max_tokens: int | None  # 1 or more; the room left in the context when unset
    stop: str | Sequence[str] | None  # texts that end the choice
    ignore_eos: bool | None  # whether to go on past end-of-sequence tokens
    logprobs: Literal["raw", "processed"] | None  # log-probability of each token: the model's, or the one drawn from
    top_logprobs: int | None  # number of most likely tokens to list at each position
    prompt_logprobs: bool | None  # raw log-probability of each prompt token
    token_ids: bool | None  # ids of the prompt and of the generated tokens
    echo: bool | None  # the prompt's text before the generated text
    include_stop: bool | None  # keeps the stop string or token that matched in the text
    special_tokens: bool | None  # shows special tokens in the text
    n: int | None  # number of choices
    best_of: int | None  # choices to generate, of which the best n come back; not for streams
    guidance_scale: float | None  # turns the text away from negative_prompt; 1 leaves the model as it is
    negative_prompt: Prompt | None  # what guidance turns away from; the prompt's last token when unset
    speculation: Literal["prompt_lookup", "draft_model"] | None  # drafts tokens, which changes the speed only
    num_draft_tokens: int | None  # tokens drafted for a step at most
    priority: int | None  # -100 to 100; higher ones go first, a step being worth 10 s of waiting


class PreviewOptions(ChainOptions, total=False):
    """Keywords of `preview`; one left out or None is off: no defaults of a model come in."""

    prompt_ids: Sequence[int] | None  # with logits: the prompt that the stages see
    output_ids: Sequence[int] | None  # tokens that count as generated already
    eos_ids: Sequence[int] | None  # tokens that end a text for the stages


_GROUPS: Final = ("sampling", "stopping", "response")
_FIELD_OF_KEYWORD: Final = MappingProxyType({"top_logprobs": "num_top_logprobs"})


def option_paths() -> dict[str, tuple[str, str]]:
    """Return the group (empty for the spec itself) and the proto field of every keyword of a generation."""
    return _paths(GenerationSpec.DESCRIPTOR, _GROUPS)


def preview_paths() -> dict[str, tuple[str, str]]:
    """Return the group and the proto field of every keyword of a preview."""
    paths = _paths(PreviewSamplingRequest.DESCRIPTOR, ("sampling",))
    return {name: path for name, path in paths.items() if name != "use_model_defaults"}


def _paths(descriptor: Any, groups: Sequence[str]) -> dict[str, tuple[str, str]]:
    keyword_of = {field: keyword for keyword, field in _FIELD_OF_KEYWORD.items()}
    fields = descriptor.fields_by_name
    paths = {name: ("", name) for name, field in fields.items() if name not in groups and not _is_prompt(field)}
    for group in groups:
        paths |= {keyword_of.get(name, name): (group, name) for name in fields[group].message_type.fields_by_name}
    return paths


def _is_prompt(field: Any) -> bool:
    return field.containing_oneof is not None and field.containing_oneof.name == "prompt"


def make_spec(prompt: object, options: Mapping[str, object]) -> GenerationSpec:
    """Return the spec for a prompt and keywords.

    Raises:
        TypeError: for a keyword that does not exist; it suggests the nearest one.
        InvalidArgumentError: for values that cannot be sent, with one violation each.
    """
    spec = GenerationSpec()
    _fill(spec, [partial(set_prompt, spec, prompt)], option_paths(), options)
    return spec


def make_preview_request(prompt: object, logits: object, options: Mapping[str, object]) -> PreviewSamplingRequest:
    """Return the request for a prompt or logits and keywords; errors as for `make_spec`."""
    request = PreviewSamplingRequest()
    if prompt is not None and logits is not None:
        raise refuse("prompt", "no prompt beside logits", prompt)
    start = []
    if prompt is not None:
        start.append(partial(set_prompt, request, prompt))
    if logits is not None:
        request.logits.SetInParent()
        start.append(partial(set_field, request.logits, "values", logits, "logits"))
    _fill(request, start, preview_paths(), options)
    return request


def _fill(
    message: Any,
    start: Sequence[Callable[[], None]],
    paths: Mapping[str, tuple[str, str]],
    options: Mapping[str, object],
) -> None:
    """Run the first steps and set what the keywords say, each in its place."""
    _check_names(options, paths)
    given = {keyword: value for keyword, value in options.items() if value is not None}
    _run_all([*start, *(partial(_set_option, message, paths[k], v) for k, v in given.items())])


def _check_names(options: Mapping[str, object], paths: Mapping[str, object]) -> None:
    known = [*paths, "timeout_s"]
    for keyword in options:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the keywords are {', '.join(sorted(known))}"
            raise TypeError(f"there is no keyword {keyword!r}{hint}")


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    """Run every step, then raise the violations of all of them together."""
    violations: list[Violation] = []
    for step in steps:
        try:
            step()
        except InvalidArgumentError as error:
            violations += error.violations
    if violations:
        raise InvalidArgumentError.of(violations)


def _set_option(spec: Any, path: tuple[str, str], value: object) -> None:
    group, name = path
    message: Any = getattr(spec, group) if group else spec
    full_name = f"{group}.{name}" if group else name
    if name == "negative_prompt":
        set_prompt(spec.negative_prompt, value)
    elif name == "stages":
        _set_stages(message, value, full_name)
    elif name == "stop" and isinstance(value, str):
        set_field(message, name, [value], full_name)
    else:
        set_field(message, name, value, full_name)


def _set_stages(sampling: Any, value: object, path: str) -> None:
    for i, item in enumerate(to_items(value, path, "a list of stages")):
        stage = _to_stage(item, f"{path}[{i}]")
        message = sampling.stages.add(name=to_text(stage.name, f"{path}[{i}].name"))
        _set_parameters(message, stage.parameters, f"{path}[{i}].parameters")


def _to_stage(value: object, path: str) -> Stage:
    if isinstance(value, Stage):
        return value
    if isinstance(value, str):
        return Stage(value)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return Stage(value[0], value[1])
    raise refuse(path, "a stage's name, a (name, parameters) pair or a Stage", value)


def _set_parameters(message: Any, parameters: object, path: str) -> None:
    if not isinstance(parameters, Mapping):
        raise refuse(path, "a mapping of parameters", parameters)
    for key, value in parameters.items():
        name = to_text(key, f"{path} (a name)")
        message.parameters[name].CopyFrom(to_value(value, f"{path}.{name}"))


def set_prompt(target: Any, prompt: object) -> None:
    """Set the prompt of a message that takes one; a TokenizeRequest takes no token ids."""
    if isinstance(prompt, str):
        target.text = to_text(prompt, "text")
        return
    takes_ids = "token_ids" in target.DESCRIPTOR.fields_by_name
    items = to_items(prompt, "prompt", "a text, a list of token ids or a list of messages")
    if not takes_ids or (items and isinstance(items[0], (Message, Mapping))):
        target.messages.SetInParent()
        for i, item in enumerate(items):
            target.messages.messages.add(**_message_fields(item, f"messages[{i}]"))
    else:
        target.token_ids.SetInParent()
        target.token_ids.ids.extend(to_token_ids(items, "token_ids"))


def _message_fields(value: object, path: str) -> dict[str, str]:
    fields = {"role": value.role, "content": value.content} if isinstance(value, Message) else value
    if not isinstance(fields, Mapping) or set(fields) != {"role", "content"}:
        raise refuse(path, "a message with role and content and nothing else", value)
    return {name: to_text(fields[name], f"{path}.{name}") for name in ("role", "content")}
