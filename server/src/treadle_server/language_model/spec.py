"""What a caller asks for and what comes back, in plain Python: the same whether it came by gRPC or in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.events import FinishReason, Timings, TokenLogprob
from treadle_server.engine.request import LogprobsMode

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A generation as it is asked for; None means unset.

    Attributes:
        prompt: a text, token ids, or messages for the chat template.
        knobs: plain sampling knobs that were set, by name, such as `{"temperature": 0.8}`.
        seed: key of the noise, 0 to 2^64 - 1; drawn when unset.
        stages: stages added to the chain by name.
        order: names of all stages in the order to run them; empty for the default order.
        max_tokens: the room left in the context when unset.
    """

    prompt: Prompt
    adapter: str = ""
    preset: str = ""
    knobs: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    stages: Sequence[StageSpec] = ()
    order: Sequence[str] = ()
    use_model_defaults: bool = True
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: LogprobsMode = LogprobsMode.NONE
    num_top_logprobs: int = 0
    prompt_logprobs: bool = False
    echo: bool = False
    include_stop: bool = False
    special_tokens: bool = False
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """What the model made of a request; the first event of every generation.

    Attributes:
        prompt_ids: ids of the prompt, BOS included.
        max_tokens: tokens that each choice may generate.
        seed: the seed used, given or drawn.
        knobs: the value in force of each plain knob.
        chain: the stages in force, in the order they run.
        prompt_logprobs: one entry a prompt token when asked for, the first without a log-probability.
    """

    request_id: str
    model: str
    weight_version: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    knobs: Mapping[str, object]
    chain: tuple[StageSpec, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text or tokens of a choice. Text lags behind the tokens while a character or a stop string is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInfo:
    """The end of a choice.

    Attributes:
        matched: the stop string or stop token that ended it, where one did.
        num_generated_tokens: tokens of the choice; the one that ended it counts, those past a stop string do not.
    """

    index: int
    reason: FinishReason
    matched: str | int | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    timings: Timings
    weight_version: int


GenerationEvent = PromptInfo | Delta | FinishInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished choice of a generation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished generation."""

    prompt_info: PromptInfo
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text
