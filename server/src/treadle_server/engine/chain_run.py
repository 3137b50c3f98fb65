"""Running chains: rows of logits in, one token or one error a row out.

Rows go through their chains one after the other, because a row's few buffers then stay in the processor's cache; only
where a stage has a way of its own to treat many rows (`apply_batch`) do they wait for each other.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from treadle_plugin_api import Logits, SamplingContext, Select, Stage
from treadle_plugin_api.contract import choice_problem, largest_problem, output_problem
from treadle_plugin_api.drawing import Draw, draw

from treadle_server.engine.chain_stages import ResolvedStage
from treadle_server.engine.stage_monitor import StageMonitor
from treadle_server.errors import NonFiniteLogitsError, StageError
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt

# Called after each sound stage with its logits [vocab] (the input for a select) and the seconds it took.
StageObserver = Callable[[ResolvedStage, Logits, float], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """The outcome of one row.

    Attributes:
        token_id: the chosen token.
        processed: logits it was drawn from, float32, as long as the model's row; None if not wanted.
    """

    token_id: int
    processed: Logits | None = None


@dataclass(slots=True)
class ChoiceSampler:
    """One choice of one request between two tokens: its chain, what its stages may know, and their states."""

    stages: tuple[ResolvedStage, ...]
    context: SamplingContext
    wants_processed: bool = False
    states: list[Any] = field(default_factory=list)

    def accept(self, token_id: int) -> None:
        """Advance by the chosen token; StageError if a stage fails."""
        for resolved, state in zip(self.stages, self.states, strict=True):
            resolved.accept(state, token_id)
        self.context.append(token_id)

    def clone(self) -> ChoiceSampler:
        """A copy that advances on its own; StageError if a stage fails."""
        states = [resolved.clone(state) for resolved, state in zip(self.stages, self.states, strict=True)]
        return ChoiceSampler(self.stages, self.context.fork(), self.wants_processed, states)


class BufferPool:
    """Output buffers that stages borrow; keep one a thread and pass it to every `sample_rows`."""

    def __init__(self) -> None:
        self._free: list[Logits] = []
        self._lent: list[Logits] = []

    def lender(self, vocab_size: int) -> Callable[[], Logits]:
        """What `context.empty()` calls during one stage."""

        def lend() -> Logits:
            if self._free and len(self._free[-1]) != vocab_size:
                self._free.clear()  # another model's turn
            buffer = self._free.pop() if self._free else np.empty(vocab_size, dtype=np.float32)
            self._lent.append(buffer)
            return buffer

        return lend

    def settle(self, held: Sequence[Logits], result: Logits | None) -> list[Logits]:
        """Take back what was lent or `held`, but for the buffers that `result` lies in, which are returned."""
        kept: list[Logits] = []
        if not held and not self._lent:
            return kept
        for buffer in (*held, *self._lent):
            (kept if result is not None and np.may_share_memory(buffer, result) else self._free).append(buffer)
        self._lent.clear()
        return kept


def sample_rows(
    samplers: Sequence[ChoiceSampler],
    logits: npt.NDArray[np.floating],
    *,
    buffers: BufferPool | None = None,
    monitor: StageMonitor | None = None,
    observe: StageObserver | None = None,
    drawer: Draw = draw,
) -> list[Sample | StageError | NonFiniteLogitsError]:
    """Choose a token for every row of `logits` [rows, vocab], row i by `samplers[i]`; drawer is what draws tokens.

    Ids past a context's `vocab_size` are the model's padding: no stage sees them. An error belongs to its row alone.
    """
    if logits.dtype != np.float32:
        with np.errstate(over="ignore"):  # a float64 past float32's range becomes an infinity, which is reported
            logits = logits.astype(np.float32)
    if not samplers:
        return []
    with np.errstate(all="ignore"):  # what a stage computes is judged by its result
        run = _Run(buffers or BufferPool(), monitor or StageMonitor(), observe, drawer)
        return run.sample(samplers, cast("Logits", logits))


@dataclass(slots=True)
class _Row:
    """One row on its way through its chain.

    Attributes:
        index: its place in the batch.
        logits: what the next stage sees, [vocab] float32.
        held: the pool's buffers that `logits` lies in.
        num_done: how many stages are behind it.
    """

    index: int
    sampler: ChoiceSampler
    logits: Logits
    width: int
    held: list[Logits] = field(default_factory=list)
    num_done: int = 0
    outcome: Sample | StageError | NonFiniteLogitsError | None = None

    @property
    def stage(self) -> ResolvedStage:
        return self.sampler.stages[self.num_done]

    @property
    def state(self) -> Any:
        return self.sampler.states[self.num_done]

    def shown(self) -> Logits:
        """The logits as the next stage gets them: read-only, but for a built-in one (argmax copies read-only rows)."""
        return self.logits if self.stage.entry.built_in else _read_only(self.logits)


class _Run:
    """One call of `sample_rows`."""

    def __init__(self, buffers: BufferPool, monitor: StageMonitor, observe: StageObserver | None, drawer: Draw) -> None:
        self._drawer = drawer
        self._buffers = buffers
        self._monitor = monitor
        self._observe = observe
        self._logits = np.empty((0, 0), dtype=np.float32)
        self._lend: Callable[[], Logits] | None = None

    def sample(
        self, samplers: Sequence[ChoiceSampler], logits: Logits
    ) -> list[Sample | StageError | NonFiniteLogitsError]:
        vocab_size = min(sampler.context.vocab_size for sampler in samplers)
        self._logits = logits[:, :vocab_size]
        self._lend = self._buffers.lender(vocab_size)
        rows = [_Row(i, sampler, self._logits[i], logits.shape[1]) for i, sampler in enumerate(samplers)]
        for row, largest in zip(rows, self._logits.max(axis=1).tolist(), strict=True):
            if not math.isfinite(largest):
                row.outcome = NonFiniteLogitsError(f"the model's largest logit is {largest}")
        while waiting := [row for row in rows if row.outcome is None and self._waits(row)]:
            self._advance_together(waiting)
        return [cast("Sample | StageError | NonFiniteLogitsError", row.outcome) for row in rows]

    def _waits(self, row: _Row) -> bool:
        """Run a row up to its end, or to a stage that treats rows together, and return whether it stands before one."""
        while row.outcome is None and not row.stage.is_batched:
            self._advance(row)
        return row.outcome is None

    def _advance(self, row: _Row) -> None:
        """Run the next stage of one row."""
        resolved, context = row.stage, self._enter(row)
        started_s = time.perf_counter()
        try:
            result = resolved.stage.apply(row.shown(), context, row.state)
        except BaseException as error:  # noqa: BLE001 - foreign code: the row fails, the others go on
            reraise_interrupt(error)
            self._watch(resolved, started_s)
            self._finish(row, resolved.error(error))
            return
        self._watch(resolved, started_s)
        if (problem := _problem(row, result)) is not None:
            self._finish(row, resolved.error(problem))
        else:
            self._note(row, started_s, result)
            self._pass_on(row, result)

    def _advance_together(self, waiting: Sequence[_Row]) -> None:
        """Run the next stage of rows that wait, those before the same stage class in one call."""
        groups: defaultdict[type, list[_Row]] = defaultdict(list)
        for row in waiting:
            groups[row.stage.entry.cls].append(row)
        for cls, group in groups.items():
            results = self._batch(cls, group) if len(group) > 1 else None
            if results is None:
                for row in group:
                    self._advance(row)
                continue
            for row, result in zip(group, results, strict=True):
                self._pass_on(row, result)

    def _batch(self, cls: type[Any], group: Sequence[_Row]) -> npt.NDArray[Any] | None:
        """One stage over many rows; None if they are better, or must be, run one by one."""
        logits = self._stacked(cls, group)
        if logits is None:
            return None
        contexts = [self._enter(row) for row in group]
        started_s = time.perf_counter()
        try:
            results = cls.apply_batch(
                [row.stage.stage for row in group], logits, contexts, [row.state for row in group]
            )
            # Nothing but one array of its own: rows that are lent buffers would be lent again.
            sound = type(results) is np.ndarray and len(results) == len(group)
            failed = not sound or any(map(_problem, group, results))
            if not sound:
                self._monitor.batch_failed(group[0].stage, "returned something else than an array of the rows")
        except BaseException as error:  # noqa: BLE001 - foreign code: row by row will tell which row is to blame
            reraise_interrupt(error)
            self._monitor.batch_failed(group[0].stage, f"raised {reason_of(error)}")
            failed = True
        self._watch(group[0].stage, started_s, num_rows=len(group))
        self._buffers.settle((), None)
        if failed:
            return None
        for row, result in zip(group, results, strict=True):
            self._note(row, started_s, result, num_rows=len(group))
        return cast("npt.NDArray[Any]", results)

    def _stacked(self, cls: type[Any], group: Sequence[_Row]) -> Logits | None:
        """The rows of a group as [rows, vocab]: a view of the model's if they lie side by side untouched, else a copy.

        A select reads its row once, so that a copy would cost as much as it saves: None.
        """
        first, last = group[0].index, group[-1].index
        if last - first + 1 == len(group) and not any(row.num_done for row in group):
            rows = self._logits[first : last + 1]
            return rows if group[0].stage.entry.built_in else _read_only(rows)
        return None if issubclass(cls, Select) else _read_only(np.stack([row.logits for row in group]))

    def _enter(self, row: _Row) -> SamplingContext:
        context = row.sampler.context
        context.enter(row.stage.key)
        context.allocate, context.drawer = self._lend, self._drawer
        return context

    def _watch(self, stage: ResolvedStage, started_s: float, *, num_rows: int = 1) -> None:
        """Report a stage that took longer than it may."""
        took_s = (time.perf_counter() - started_s) / num_rows
        if took_s > self._monitor.max_stage_s:
            self._monitor.slow(stage, took_s)

    def _note(self, row: _Row, started_s: float, result: Any, *, num_rows: int = 1) -> None:
        if self._observe is not None:
            shown = row.logits if isinstance(row.stage.stage, Select) else result
            self._observe(row.stage, shown, (time.perf_counter() - started_s) / num_rows)

    def _pass_on(self, row: _Row, result: Any) -> None:
        """Take a stage's sound result: the next stage's input, or the token."""
        if isinstance(row.stage.stage, Stage):
            row.held = self._buffers.settle(row.held, result)
            row.logits = result
            row.num_done += 1
        elif row.sampler.wants_processed:
            self._finish(row, self._with_distribution(row, int(result)))
        else:
            self._finish(row, Sample(int(result)))

    def _with_distribution(self, row: _Row, token_id: int) -> Sample | StageError:
        """The sample with the logits it was drawn from, padded to the model's row."""
        resolved, context = row.stage, self._enter(row)
        try:
            drawn_from = cast("Select", resolved.stage).distribution(row.shown(), context, row.state)
        except BaseException as error:  # noqa: BLE001 - foreign code
            reraise_interrupt(error)
            return resolved.error(error)
        if not resolved.entry.built_in and (problem := output_problem(row.logits, drawn_from)) is not None:
            return resolved.error(problem)
        processed = np.full(row.width, -np.inf, dtype=np.float32)
        processed[: len(drawn_from)] = drawn_from
        return Sample(token_id, processed)

    def _finish(self, row: _Row, outcome: Sample | StageError) -> None:
        row.outcome = outcome
        row.held = self._buffers.settle(row.held, None)


def _problem(row: _Row, result: Any) -> str | None:
    """What is wrong with a stage's result; built-in stages are only asked whether a token is left."""
    if isinstance(row.stage.stage, Select):
        return None if row.stage.entry.built_in else choice_problem(row.logits, result)
    return largest_problem(result) if row.stage.entry.built_in else output_problem(row.logits, result)


def _read_only(array: Logits) -> Logits:
    view = array.view()
    view.flags.writeable = False
    return view
