"""What a caller asks for and what comes back, in plain Python: the same whether it came by gRPC or in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.events import FinishReason, Timings, TokenLogprob
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.speculation import Speculation

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A generation as it is asked for; None means unset.

    Attributes:
        prompt: a text, token ids, or messages for the chat template.
        adapter: name of a loaded adapter; empty for the bare model.
        knobs: plain sampling knobs that were set, by name, such as `{"temperature": 0.8}`.
        seed: key of the noise, 0 to 2^64 - 1; drawn when unset.
        stages: stages added to the chain by name.
        order: names of all stages in the order to run them; empty for the default order.
        max_tokens: the room left in the context when unset.
        best_of: choices to generate, of which the best n are kept; not for streams.
        guidance_scale: how strongly the text is turned away from `negative_prompt`; 1 is not at all.
        negative_prompt: the prompt's last token alone when unset.
        speculation: where drafted tokens come from.
        num_draft_tokens: tokens drafted for a step at most.
        priority: higher ones go first, -100 to 100; a step is worth 10 s of waiting.
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
    best_of: int | None = None
    guidance_scale: float = 1.0
    negative_prompt: Prompt | None = None
    speculation: Speculation = Speculation.NONE
    num_draft_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """What the model made of a request; the first event of every generation.

    Attributes:
        weight_version: version of the weights that answer, whatever is loaded meanwhile.
        adapter: name of the adapter that answers; empty for the bare model.
        adapter_version: its version; 0 for the bare model.
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
    adapter: str
    adapter_version: int
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

    def followed_by(self, later: Delta) -> Delta:
        """Return what this one and a later one of the same choice say together."""
        return Delta(
            index=self.index,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
        )


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
    num_draft_tokens: int
    num_accepted_tokens: int
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreviewSpec:
    """A preview as it is asked for. Nothing of a model's or a server's defaults comes in: only what is given acts.

    Attributes:
        prompt: what the model sees before the token, `output_ids` after it; None when logits are given.
        logits: the row to start from, [vocab]; -inf is a masked token.
        prompt_ids: with logits, the prompt that the stages see.
        output_ids: tokens that count as sampled already.
        eos_ids: end-of-sequence tokens that the stages see.
        stop_token_ids: stop tokens that the stages see.
        adapter: name of a loaded adapter, with a prompt; empty for the bare model.
        preset: a preset whose values unset knobs take.
        knobs: plain sampling knobs that were set, by name.
        seed: key of the noise, 0 to 2^64 - 1; drawn when unset.
        stages: stages added to the chain by name.
        order: names of all stages in the order to run them; empty for the default order.
    """

    prompt: Prompt | None = None
    logits: Sequence[float] | npt.NDArray[Any] | None = None
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    eos_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    adapter: str = ""
    preset: str = ""
    knobs: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    stages: Sequence[StageSpec] = ()
    order: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageResult:
    """The distribution after one stage.

    Attributes:
        stage: name of the stage.
        parameters: its parameters.
        kept: ids of the tokens that are not masked, ascending, [kept] int64.
        kept_probabilities: theirs, [kept] float64, summing to 1; every other token has 0.
        vocab_size: number of tokens in all.
    """

    stage: str
    parameters: Mapping[str, object]
    kept: npt.NDArray[np.int64]
    kept_probabilities: npt.NDArray[np.float64]
    vocab_size: int

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """Probability of each token, [vocab] float64."""
        dense = np.zeros(self.vocab_size)
        dense[self.kept] = self.kept_probabilities
        return dense


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingPreview:
    """What a chain makes of a row of logits.

    Attributes:
        initial: the distribution before the first stage, under the name `logits`.
        stages: the distribution after each stage in the order they run; after the select, the one drawn from.
        chosen: the token that the seed chooses.
        knobs: the value in force of each plain knob.
    """

    initial: StageResult
    stages: tuple[StageResult, ...]
    chosen: int
    seed: int
    knobs: Mapping[str, object]
