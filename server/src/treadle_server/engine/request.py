"""A request as the engine takes it: checked, encoded, with its sampling chain built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from treadle_server.engine.chain import SamplingChain
from treadle_server.engine.guidance import Guidance
from treadle_server.engine.speculation import Speculation
from treadle_server.engine.weights import LoadedAdapter


class LogprobsMode(Enum):
    """Which log-probabilities a request wants of its generated tokens."""

    NONE = auto()
    RAW = auto()
    PROCESSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate.

    Attributes:
        prompt_ids: int64 [prompt], at least one.
        seed: key of all noise of the request.
        n: number of choices; they share one prefill.
        max_tokens: tokens a choice may generate; 0 scores the prompt only.
        truncated: whether `max_tokens` is the room left in the context rather than what was asked for.
        eos_ids: end-of-sequence tokens in force; empty when they are to be ignored.
        stop_ids: the request's own stop tokens.
        num_top_logprobs: how many of the most likely tokens to list.
        guidance: the negative prompt and how strongly it is turned away from.
        speculation: where drafted tokens come from, `max_draft_tokens` at most for a step.
        priority: higher ones go first; see `ActiveRequest.rank_s`.
        adapter: changes the weights for this request; None for the bare model.
    """

    request_id: str
    prompt_ids: npt.NDArray[np.int64]
    chain: SamplingChain
    seed: int
    n: int = 1
    max_tokens: int
    truncated: bool = False
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    logprobs: LogprobsMode = LogprobsMode.NONE
    num_top_logprobs: int = 0
    prompt_logprobs: bool = False
    guidance: Guidance | None = None
    speculation: Speculation = Speculation.NONE
    max_draft_tokens: int = 0
    priority: int = 0
    adapter: LoadedAdapter | None = None

    @property
    def adapter_version(self) -> int:
        """Version of the adapter; 0 for the bare model."""
        return 0 if self.adapter is None else self.adapter.version

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence, prompt included."""
        return len(self.prompt_ids) + self.max_tokens
