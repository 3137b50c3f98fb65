"""What observers of requests are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """A generation that was checked and queued.

    Attributes:
        request_id: the id that logs and answers have.
        model: name of the model.
        chain: names of the stages that choose its tokens, in the order in which they run.
        num_prompt_tokens: length of the prompt.
        num_choices: number of answers asked for.
        max_tokens: tokens that each may have.
    """

    request_id: str
    model: str
    chain: tuple[str, ...]
    num_prompt_tokens: int
    num_choices: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """A generation that has ended, in whatever way.

    Attributes:
        request_id: that of its RequestInfo.
        model: name of the model.
        reasons: why each choice ended: `eos`, `stop_token`, `stop_string`, `max_tokens`, `context_full`, `cancelled` or
            `failed`.
        error: what went wrong; empty unless it failed.
        num_prompt_tokens: length of the prompt.
        num_generated_tokens: tokens of all choices together.
        queue_s: seconds until its first step.
        prefill_s: seconds from there to the first token.
        decode_s: seconds from there to the last token of the last choice; all three are 0 where there was no token.
    """

    request_id: str
    model: str
    reasons: tuple[str, ...]
    error: str
    num_prompt_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
