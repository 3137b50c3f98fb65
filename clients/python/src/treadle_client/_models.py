"""What the client takes and returns: frozen dataclasses, in the protocol's words.

Durations end in `_s` (seconds), sizes in `_bytes`. A token's `token` is its own bytes, which need not be whole
characters. Fields that were not asked for are empty tuples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; a mapping with the same two keys does as well."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A sampler stage by name, with its parameters (bool, int, float, str, and lists and dicts of them)."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """A token among the most likely ones at a position."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its natural log-probability and its rank, 1 being the most likely.

    `logprob` is None where there is none: for the first token of a text, and for a probability of zero.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int | None
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """What the server made of a request: the values in force of every knob, the seed used, the chain it runs."""

    request_id: str
    model: str
    weight_version: int
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    knobs: Mapping[str, object]
    chain: tuple[Stage, ...]
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    adapter: str
    adapter_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of one choice in seconds: waiting, until its first token, from the first token to the last."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why and how a choice ended.

    Attributes:
        reason: `eos`, `stop_token`, `stop_string`, `max_tokens` or `context_full`; `unknown_N` for the reason number N
            of a newer server.
        eos_token_id: the token that ended it, for `eos`.
        stop_token_id: the token that ended it, for `stop_token`.
        stop_string: the text that ended it, for `stop_string`.
        usage: how many tokens were used.
        timings: how long it took.
        weight_version: version of the weights that generated the choice.
    """

    reason: str
    eos_token_id: int | None
    stop_token_id: int | None
    stop_string: str | None
    usage: Usage
    timings: Timings
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One piece of a stream: new text and tokens of the choice `index`, or its end, when `finish` is set.

    `token_ids` and `logprobs` can run ahead of `text`, which holds whole characters only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Everything about a generation at once; the choices are in order of their index."""

    prompt_info: PromptInfo
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The model's own log-probability of each given token, before any sampler stage; the first token has none."""

    model: str
    weight_version: int
    adapter_version: int
    raw_logprobs: tuple[TokenLogprob, ...]
    total_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a text: it covers the characters [start, end), counted in code points."""

    id: int
    token: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model."""

    name: str
    model_type: str
    vocab_size: int
    context_length: int
    num_parameters: int
    dtype: str
    backend: str
    numerics: str
    weight_version: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_knobs: Mapping[str, object]
    weight_label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A loaded adapter; `version` counts up each time that one is loaded under its name."""

    name: str
    model: str
    version: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampler stage that the server has.

    `kind` is `mask`, `penalty`, `transform`, `filter` or `select`; `parameters_json_schema` is JSON text;
    `num_slow_calls` counts the calls that took longer than the server's `max_stage_s`.
    """

    name: str
    kind: str
    plugin: str
    parameters_json_schema: str
    summary: str
    num_slow_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin; its `status` is `active`, `blocked`, `not_installed` or `failed`, all but the first with the reason."""

    name: str
    distribution: str
    version: str
    status: str
    reason: str
    stages: tuple[str, ...]
    families: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """The sampler stages in the default order of their kinds, and the plugins that bring them or could not."""

    samplers: tuple[Sampler, ...]
    plugins: tuple[Plugin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The server's limits on requests."""

    max_message_bytes: int
    max_queued_requests: int
    max_queued_tokens: int
    max_choices: int
    max_top_logprobs: int
    max_stop_sequences: int
    max_trace_tokens: int
    max_trace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the server is."""

    version: str
    protocol_version: str
    capabilities: tuple[str, ...]
    limits: Limits
    uptime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """How busy one model is.

    Attributes:
        num_running_sequences: those that hold memory of keys and values.
        num_paused_sequences: those that wait for readers who lag behind them.
        num_preempted_sequences: those that gave their memory back and wait for some.
        num_preemptions: how often one did, since the start.
        num_prefix_hit_tokens: tokens found in the prefix cache since the start, of `num_prefix_queried_tokens`.
    """

    model: str
    num_waiting_requests: int
    num_waiting_tokens: int
    num_running_sequences: int
    kv_cache_bytes: int
    max_kv_cache_bytes: int
    num_generated_tokens: int
    num_weight_versions: int
    num_paused_sequences: int
    num_preempted_sequences: int
    num_preemptions: int
    prefix_cache_bytes: int
    max_prefix_cache_bytes: int
    num_prefix_hit_tokens: int
    num_prefix_queried_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace(Mapping[str, Any]):
    """The intermediates of one forward pass by name, in the order in which they were computed.

    The values are NumPy arrays where NumPy is installed, Tensors otherwise: `[tokens, ...]`, or `[heads, tokens, ...]`
    for those of each head.

    Attributes:
        model: name of the model.
        weight_version: version of its weights.
        token_ids: ids of the prompt, BOS included.
        tokens: the tokens' own bytes.
        tensors: the arrays.
    """

    model: str
    weight_version: int
    token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...]
    tensors: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreviewStage:
    """The distribution after one stage of a chain.

    `probabilities` has one number a vocabulary id, summing to 1, and `kept` the ids of the tokens that are not masked,
    ascending: NumPy arrays where NumPy is installed, tuples otherwise.
    """

    stage: str
    parameters: Mapping[str, object]
    probabilities: Any = field(repr=False)
    kept: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview(Sequence[PreviewStage]):
    """What a sampling chain makes of a row of logits: a sequence of its stages, the last of which chooses.

    Attributes:
        stages: the distribution after each stage; after the last, the one the token is drawn from.
        initial: the distribution before the first stage, called `logits`.
        chosen: the token that the seed chooses.
        seed: the seed used, given or drawn.
        knobs: the value in force of every plain knob.
    """

    stages: tuple[PreviewStage, ...]
    initial: PreviewStage
    chosen: int
    seed: int
    knobs: Mapping[str, object]

    @overload
    def __getitem__(self, index: int) -> PreviewStage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PreviewStage, ...]: ...
    def __getitem__(self, index: int | slice) -> PreviewStage | tuple[PreviewStage, ...]:
        return self.stages[index]

    def __len__(self) -> int:
        return len(self.stages)
