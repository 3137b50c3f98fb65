"""Generates more choices than are asked for and keeps those with the highest mean raw log-probability of a token."""

from __future__ import annotations

from dataclasses import replace

from treadle_server.engine.request import LogprobsMode
from treadle_server.language_model.spec import Choice, GenerationResult, GenerationSpec


def widen(spec: GenerationSpec) -> GenerationSpec:
    """Return the spec of all the choices to choose from, with the log-probabilities that rank them."""
    if spec.best_of is None:
        return spec
    return replace(spec, n=spec.best_of, best_of=None, logprobs=LogprobsMode.RAW)


def keep_best(result: GenerationResult, spec: GenerationSpec) -> GenerationResult:
    """Return the n best choices of a widened generation, best first, as the spec asked for them before."""
    if spec.best_of is None:
        return result
    ranked = sorted(result.choices, key=_mean_logprob, reverse=True)[: spec.n]
    return replace(result, choices=tuple(_renumber(choice, i, spec) for i, choice in enumerate(ranked)))


def _mean_logprob(choice: Choice) -> float:
    values = [item.logprob for item in choice.logprobs if item.logprob is not None]
    return sum(values) / len(values) if values else float("-inf")


def _renumber(choice: Choice, index: int, spec: GenerationSpec) -> Choice:
    logprobs = () if spec.logprobs is LogprobsMode.NONE else choice.logprobs
    return replace(choice, index=index, logprobs=logprobs, finish=replace(choice.finish, index=index))
