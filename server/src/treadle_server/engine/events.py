"""What the engine tells about a request. Token ids only: text is made outside the engine.

What is made for every token is a named tuple or not frozen: to make a frozen dataclass takes four times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from treadle_server.errors import TreadleError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token at a position, with its natural log-probability.

    Attributes:
        token_id: the token.
        logprob: None where there is none: the first token of a prompt, or a probability of zero.
        rank: 1 for the most likely token; ties take the lowest rank of theirs. None with `logprob` of a first token.
        top: the most likely tokens of the position as (token id, log-probability), most likely first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(Enum):
    """Why a choice ended."""

    EOS = auto()
    STOP_TOKEN = auto()
    STOP_STRING = auto()  # set outside the engine, by whoever reads the text
    MAX_TOKENS = auto()
    CONTEXT_FULL = auto()


class Timings(NamedTuple):
    """Durations of a choice in seconds: waiting, first step to first token, first token to last."""

    queue_s: float
    prefill_s: float
    decode_s: float


class TokenCounts(NamedTuple):
    """Tokens of a choice that took less work than others.

    Attributes:
        num_cached: tokens of the prompt whose keys and values were known already.
        num_draft: tokens that were drafted.
        num_accepted: drafted tokens that were the ones sampled.
    """

    num_cached: int = 0
    num_draft: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the next prompt tokens, in order; long prompts send several of these."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class NewToken:
    """A choice has one more token; `is_stop` when it is the stop token that ends the choice."""

    index: int
    token_id: int
    is_stop: bool
    logprob: TokenLogprob | None
    timings: Timings
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice has ended; nothing more comes for it."""

    index: int
    reason: FinishReason
    matched_token_id: int | None
    timings: Timings
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The whole request has ended with an error; nothing more comes for it."""

    error: TreadleError


EngineEvent = PromptScored | NewToken | ChoiceFinished | RequestFailed


def size_of(events: Iterable[EngineEvent]) -> int:
    """Return how many tokens events carry, the likely ones listed beside them included; one at least each."""
    return sum(_size_of(event) for event in events)


def _size_of(event: EngineEvent) -> int:
    if isinstance(event, PromptScored):
        return sum(1 + len(entry.top) for entry in event.logprobs)
    if isinstance(event, NewToken) and event.logprob is not None:
        return 1 + len(event.logprob.top)
    return 1


def is_over(events: Iterable[EngineEvent]) -> bool:
    """Tell whether a request of one choice has ended with these events; raise its error if it failed."""
    for event in events:
        if isinstance(event, RequestFailed):
            raise event.error
        if isinstance(event, ChoiceFinished):
            return True
    return False
