"""The conformance suite for sampler authors.

    from treadle_plugin_api.testing import check_stage

    def test_conforms():
        check_stage(Sharpen, strength=3.0)

A stage that passes behaves the same alone, in any batch, and on every row a model can produce. For losses and
optimizers there are `check_loss` and `check_optimizer`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from treadle_plugin_api.context import ModelInfo, SamplingContext
from treadle_plugin_api.contract import choice_problem, class_problems, output_problem
from treadle_plugin_api.logits import Logits
from treadle_plugin_api.random import stage_key
from treadle_plugin_api.sampling import Select, Stage
from treadle_plugin_api.testing_training import check_loss, check_optimizer

__all__ = ["MAX_STAGE_S", "check_loss", "check_optimizer", "check_stage", "sample_context", "sample_model_info"]

_NUM_ROWS = 8
# Odd, and no multiple of any register width: code that assumes either fails here.
_VOCAB_SIZE = 257
# The longest row that models have today, and what a server by default puts up with for one call on it.
_LARGE_VOCAB_SIZE = 152_000
MAX_STAGE_S = 0.05


def check_stage(cls: type[Stage | Select], /, **parameters: Any) -> None:
    """Check a stage class with the given parameters; raises AssertionError that says what rule is broken, on which row.

    Checked: the class and its schema; alone == in a batch == in a shuffled batch, beside rows of the default parameters
    too; a vocabulary of one token; more
    tokens wanted than there are; all logits equal; all but one masked; huge logits; read-only input; same seed, same
    result; applying twice == applying once; clones that advance apart; a batch that raises half way leaves no trace;
    the largest token stays largest if `argmax_invariant` says so; a call on a row of 152,000 takes under MAX_STAGE_S.
    Parameters that the stage's own check refuses for each of these vocabularies test nothing, and fail.
    """
    _check_class(cls)
    stage = _round_trip(cls, parameters)
    if parameters:
        _check_some_vocabulary_fits(stage)
    for label, logits in _rows():
        _check_row(_Case(stage, label, logits))
    _check_clone(stage)
    _check_batch(stage)
    _check_cost(stage)


@dataclass(frozen=True, slots=True)
class _Case:
    """One stage on one row of logits."""

    stage: Stage | Select
    label: str
    logits: Logits

    def fail(self, what: str) -> AssertionError:
        return AssertionError(f"stage {self.stage.name!r} on {self.label}: {what}")


def sample_context(vocab_size: int, *, seed: int = 7, num_outputs: int = 3) -> SamplingContext:
    """A context as a request has it half way: a prompt, some output, one eos id and one stop id, letters as tokens."""
    return SamplingContext(
        vocab_size=vocab_size,
        prompt_ids=[token % vocab_size for token in (1, 2, 3, 2)],
        output_ids=[token % vocab_size for token in range(4, 4 + num_outputs)],
        eos_ids=[0],
        stop_ids=[vocab_size - 1],
        token_bytes=_token_bytes,
        seed=seed,
    )


def sample_model_info(vocab_size: int) -> ModelInfo:
    """The model of `sample_context`."""
    return ModelInfo(
        name="check",
        vocab_size=vocab_size,
        context_length=4096,
        eos_ids=frozenset([0]),
        token_bytes=_token_bytes,
        encode=lambda text: [byte % vocab_size for byte in text.encode()],
    )


def _token_bytes(token_id: int) -> bytes:
    """Tokens a, b, ... z, aa, ab, ..., and nothing for the first, which ends a text."""
    text = b""
    while token_id > 0:
        token_id, letter = divmod(token_id - 1, 26)
        text = bytes([ord("a") + letter]) + text
    return text


def _check_class(cls: type[Stage | Select]) -> None:
    problems = class_problems(cls)
    problems += [
        f"the parameter {name!r} has no {what}"
        for name, field in getattr(cls, "model_fields", {}).items()
        for what, missing in (("description", not field.description), ("default", field.is_required()))
        if missing
    ]
    if not vars(cls).get("__doc__"):
        problems.append("the class has no docstring; its first line is shown to users")
    if problems:
        raise AssertionError(f"{cls.__name__}: {'; '.join(problems)}")


def _round_trip(cls: type[Stage | Select], parameters: dict[str, Any]) -> Stage | Select:
    """The stage, read back from what it writes; unknown parameters must be refused."""
    stage = cls.model_validate_json(json.dumps(parameters), strict=True)
    if cls.model_validate_json(stage.model_dump_json(), strict=True).model_dump() != stage.model_dump():
        raise AssertionError(f"stage {cls.name!r} does not survive being written as JSON and read back")
    try:
        cls.model_validate_json(json.dumps({**parameters, "no_such_parameter": 1}), strict=True)
    except ValidationError:
        return stage
    raise AssertionError(f"stage {cls.name!r} takes parameters that it does not have")


def _rows() -> Iterator[tuple[str, Logits]]:
    """Rows that models and earlier stages produce, each with a label."""
    rng = np.random.default_rng(0)
    ordinary = (3 * rng.standard_normal(_VOCAB_SIZE)).astype(np.float32)
    yield "ordinary logits", ordinary
    yield "a vocabulary of one token", np.array([1.5], dtype=np.float32)
    yield "a vocabulary of two tokens", np.array([1.5, -0.5], dtype=np.float32)
    yield "the prompt's tokens ahead", np.where(np.arange(_VOCAB_SIZE) < 4, 20 + ordinary, ordinary)
    yield "equal logits", np.zeros(_VOCAB_SIZE, dtype=np.float32)
    yield "pairs of equal logits", np.repeat(ordinary, 2)
    yield "half of the tokens masked", np.where(rng.random(_VOCAB_SIZE) < 0.5, ordinary, -np.inf).astype(np.float32)
    yield "all but one token masked", np.where(np.arange(_VOCAB_SIZE) == 5, ordinary, -np.inf).astype(np.float32)
    for size in (1e3, 1e30):
        yield f"logits up to {size:g}", (ordinary * size).astype(np.float32)
        yield f"logits near {size:g}", np.full(_VOCAB_SIZE, size, dtype=np.float32) + ordinary


def _fits(stage: Stage | Select, vocab_size: int) -> bool:
    """Whether the stage's own check accepts the model; a refusal by ValueError is its right."""
    return _refusal(stage, vocab_size) is None


def _refusal(stage: Stage | Select, vocab_size: int) -> ValueError | None:
    try:
        stage.check(sample_model_info(vocab_size))
    except ValueError as error:
        return error
    return None


def _check_some_vocabulary_fits(stage: Stage | Select) -> None:
    refusals = [_refusal(stage, len(logits)) for _, logits in _rows()]
    if None not in refusals:
        raise AssertionError(f"stage {stage.name!r} was not tested: its check refuses every model, {refusals[-1]}")


def _apply(stage: Stage | Select, logits: Logits, context: SamplingContext, state: Any) -> Any:
    """One call as the engine makes it: draws from 0, read-only input."""
    context.enter(stage_key(stage.name))
    frozen = logits.copy()
    frozen.flags.writeable = False
    return stage.apply(frozen, context, state)


def _start(stage: Stage | Select, context: SamplingContext) -> Any:
    context.enter(stage_key(stage.name))
    return stage.start(context)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other))


def _check_row(case: _Case) -> None:
    """The rules for a single row."""
    stage, logits = case.stage, case.logits
    if not _fits(stage, len(logits)):
        return
    context = sample_context(len(logits))
    state = _start(stage, context)
    try:
        result = _copied(_apply(stage, logits, context, state))
    except Exception as error:
        if stage.kind == "mask" and isinstance(error, ValueError):
            return  # a ban that leaves nothing fails its request, which is a mask's right
        raise case.fail(f"raised {type(error).__name__}: {error}") from error
    rule = choice_problem if isinstance(stage, Select) else output_problem
    if (problem := rule(logits, result)) is not None:
        raise case.fail(problem)
    if not _same(result, _apply(stage, logits, context, state)):
        raise case.fail("applied twice, it gives another result: it may not advance anything but in accept")
    again = sample_context(len(logits))
    if not _same(result, _apply(stage, logits, again, _start(stage, again))):
        raise case.fail("the same seed gives another result: draw with context.uniform() alone")
    if stage.argmax_invariant and isinstance(stage, Stage) and result.argmax() != logits.argmax():
        raise case.fail("the largest token is another one now, though argmax_invariant is True")
    if isinstance(stage, Select) and (problem := output_problem(logits, stage.distribution(logits, context, state))):
        raise case.fail(f"distribution {problem}")


def _copied(result: Any) -> Any:
    return result.copy() if isinstance(result, np.ndarray) else result


def _check_clone(stage: Stage | Select) -> None:
    """A clone must not notice what its original accepts, nor the original what the clone does."""
    label, logits = next(_rows())
    case = _Case(stage, label, logits)
    if not _fits(stage, len(logits)):
        return
    context = sample_context(len(logits))
    state = _start(stage, context)
    stage.accept(state, 5)
    cloned = stage.clone(state)
    before = _copied(_apply(stage, logits, context, cloned))
    if not _same(before, _apply(stage, logits, context, state)):
        raise case.fail("a clone gives another result than its original")
    again = sample_context(len(logits))
    state_again = _start(stage, again)
    stage.accept(state_again, 5)
    if not _same(before, _apply(stage, logits, again, state_again)):
        raise case.fail("the same accepted token gives another result: accept may not draw")
    for token_id in (9, 5, 9, 5):
        stage.accept(state, token_id)
    if not _same(before, _apply(stage, logits, context, cloned)):
        raise case.fail("a clone changes when its original accepts a token")
    before = _copied(_apply(stage, logits, context, state))
    for token_id in (7, 6, 7):
        stage.accept(cloned, token_id)
    if not _same(before, _apply(stage, logits, context, state)):
        raise case.fail("an original changes when its clone accepts a token")


def _kind_of(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


class _Tripwire(Sequence[Any]):
    """A sequence that raises when its middle is read: a batch that fails half way."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if index == len(self._items) // 2:
            raise _TrippedError
        return self._items[index]


class _TrippedError(Exception):
    """The batch failed half way, as planned."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of different requests, with what the stage makes of each alone."""

    stages: Sequence[Stage | Select]
    logits: Logits
    contexts: Sequence[SamplingContext]
    states: Sequence[Any]

    @classmethod
    def of(cls, stage: Stage | Select, other: Stage | Select) -> _Batch:
        rng = np.random.default_rng(1)
        logits = (3 * rng.standard_normal((_NUM_ROWS, _VOCAB_SIZE))).astype(np.float32)
        contexts = [sample_context(_VOCAB_SIZE, seed=i, num_outputs=1 + i) for i in range(_NUM_ROWS)]
        stages = [other if row % 3 == 1 else stage for row in range(_NUM_ROWS)]
        states = [_start(one, context) for one, context in zip(stages, contexts, strict=True)]
        for row, state in enumerate(states):
            for token_id in range(row):
                stages[row].accept(state, token_id)
        return cls(stages, logits, contexts, states)

    def alone(self) -> list[Any]:
        rows = zip(self.stages, self.logits, self.contexts, self.states, strict=True)
        return [_copied(_apply(stage, row, context, state)) for stage, row, context, state in rows]

    def together(self, order: Sequence[int], wrap: Callable[[Sequence[Any]], Sequence[Any]] = list) -> Any:
        frozen = self.logits[list(order)]
        frozen.flags.writeable = False
        contexts = [self.contexts[i] for i in order]
        for context in contexts:
            context.enter(stage_key(self.stages[0].name))
        apply_batch = cast("Callable[..., Any]", type(self.stages[0]).apply_batch)
        return apply_batch([self.stages[i] for i in order], frozen, wrap(contexts), [self.states[i] for i in order])


def _check_batch(stage: Stage | Select) -> None:
    """A row's result must not depend on the rows beside it, their parameters, nor on a batch that failed before."""
    if not _fits(stage, _VOCAB_SIZE):
        return
    default = type(stage)()
    batch = _Batch.of(stage, default if _fits(default, _VOCAB_SIZE) else stage)
    case = _Case(stage, f"a batch of {_NUM_ROWS} rows", batch.logits)
    alone = batch.alone()
    for order in (range(_NUM_ROWS), (5, 2, 7, 0, 3, 6, 1, 4), (3, 1)):
        together = batch.together(order)
        kind = np.integer if isinstance(stage, Select) else np.float32
        if not isinstance(together, np.ndarray) or not np.issubdtype(together.dtype, kind):
            raise case.fail(f"apply_batch must return an array of {kind.__name__}, but returns {_kind_of(together)}")
        if len(together) != len(order):
            raise case.fail(f"apply_batch returns {len(together)} results for {len(order)} rows")
        for place, row in enumerate(order):
            if not _same(together[place], alone[row]):
                raise case.fail(
                    f"row {row} gives another result at place {place} of the batch {list(order)} than alone"
                )
    with contextlib.suppress(Exception):  # it may raise anything; what counts is what it leaves behind
        batch.together(range(_NUM_ROWS), _Tripwire)
    if not all(map(_same, alone, batch.alone())):
        raise case.fail("a batch that raised half way changed what the rows give afterwards")


def _check_cost(stage: Stage | Select) -> None:
    """One call on the longest row may not take longer than a server puts up with; the quickest of a few counts."""
    if not _fits(stage, _LARGE_VOCAB_SIZE):
        return
    logits = (3 * np.random.default_rng(2).standard_normal(_LARGE_VOCAB_SIZE)).astype(np.float32)
    context = sample_context(_LARGE_VOCAB_SIZE)
    state = _start(stage, context)
    quickest_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        _apply(stage, logits, context, state)
        quickest_s = min(quickest_s, time.perf_counter() - started_s)
        if quickest_s < MAX_STAGE_S:
            return
    case = _Case(stage, f"a row of {_LARGE_VOCAB_SIZE} tokens", logits)
    raise case.fail(f"takes {quickest_s:.3f} s, over {MAX_STAGE_S} s: every request beside it waits so long per token")
