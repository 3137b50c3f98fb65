"""Which stages a request runs, and in which order: from its knobs, named stages and order to a chain.

The steps, each a function below: knobs make stages; named stages join them; the order is the default one or the
request's; a select is added if none is named; greedy drops what cannot matter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle_plugin_api import ModelInfo, Select, Stage
from treadle_plugin_api.sampling import Kind

from treadle_server.engine.chain_parameters import ParameterError, build_stage
from treadle_server.engine.chain_stages import ResolvedStage, StageSpec
from treadle_server.errors import InvalidRequestError, StageError, Violation
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.registry import KnobEntry, StageEntry, StageRegistry

# At or under this a temperature means greedy: a draw has long been the argmax, and the division would overflow.
GREEDY_BELOW = 1e-5

_KIND_RANKS: Mapping[Kind, int] = {"mask": 0, "penalty": 1, "transform": 2, "filter": 3, "select": 4}
# Stages with a place of their own at the front of their kind.
_FIRST_OF_KIND = ("grammar", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A stage that may join the chain.

    Attributes:
        explicit: whether the request itself asks for it, rather than a preset or the model's defaults.
        field: path of what asks for it, for messages.
        named: whether it comes from `stages` rather than from knobs.
    """

    entry: StageEntry
    stage: Stage | Select
    explicit: bool
    field: str
    named: bool = False

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_placed(self) -> bool:
        """Whether its parameters are below `field`, rather than plain knobs."""
        return self.field.startswith("stages")

    @property
    def is_cold(self) -> bool:
        """Whether it is a temperature so low that the chain is greedy."""
        return (
            self.entry.built_in and self.name == "temperature" and self.stage.model_dump()["temperature"] < GREEDY_BELOW
        )


@dataclass(slots=True)
class ChainResolver:
    """Resolves one request; collects violations so that all wrong fields are reported together."""

    registry: StageRegistry
    explicit: Mapping[str, object]
    defaults: Mapping[str, object]
    stages: Sequence[StageSpec]
    order: Sequence[str] | None
    model_info: ModelInfo
    violations: list[Violation] = field(default_factory=list)

    def resolve(self) -> tuple[tuple[ResolvedStage, ...], dict[str, object]]:
        """The stages in the order in which they run, and the value in force of every knob."""
        candidates = self._without_rivals([*self._knob_candidates(), *self._named_candidates()])
        self._raise_violations()
        ordered = self._by_default(candidates) if self.order is None else self._by_order(candidates)
        self._raise_violations()
        ordered = self._with_one_select(ordered)
        self._raise_violations()
        for candidate in ordered:
            self._check(candidate)
        self._raise_violations()
        return _resolved(_without_idle(ordered)), self._knobs_in_force(ordered)

    def _raise_violations(self) -> None:
        if self.violations:
            raise InvalidRequestError(self.violations)

    def _refuse(self, path: str, message: str) -> None:
        self.violations.append(Violation(path, message))

    # Knobs.

    def _knob_candidates(self) -> list[_Candidate]:
        for name in self.explicit:
            if name not in self.registry.knobs:
                self._refuse(name, f"is no sampling knob; the knobs: {', '.join(self.registry.knobs)}")
        made = (self._from_knobs(entry) for entry in self.registry.entries())
        return [candidate for candidate in made if candidate is not None]

    def _from_knobs(self, entry: StageEntry) -> _Candidate | None:
        """The stage that the knobs of `entry` make; None if they leave it off."""
        knobs = [knob for knob in self.registry.knobs.values() if knob.entry is entry]
        values = {knob.name: self._value(knob) for knob in knobs}
        given = [knob for knob in knobs if knob.name in self.explicit or knob.name in self.defaults]
        on = [knob for knob in given if not knob.is_off(values[knob.name])]
        if not on:
            return None
        try:
            stage = build_stage(entry.cls, {knob.name: values[knob.name] for knob in on})
        except ParameterError as error:
            self._refuse_knobs(error)
            return None
        if not any(knob.off for knob in on):
            return None
        explicit = [knob for knob in on if knob.name in self.explicit]
        return _Candidate(entry, stage, bool(explicit), (explicit or on)[0].name)

    def _value(self, knob: KnobEntry) -> object:
        return self.explicit.get(knob.name, self.defaults.get(knob.name, knob.default))

    def _refuse_knobs(self, error: ParameterError) -> None:
        for violation in error.violations(""):
            name, message = re.split(r"[.\[]", violation.field)[0], violation.message
            if name in self.registry.knobs and (off := _extra_off(self.registry.knobs[name])):
                message = message.replace("; received", f", or {off} for off; received", 1)
            if name not in self.explicit:
                message += " from the preset or the model's defaults"
            self._refuse(violation.field, message)

    def _knobs_in_force(self, ordered: Sequence[_Candidate]) -> dict[str, object]:
        stages = {candidate.name: candidate.stage for candidate in ordered}
        return {
            knob.name: getattr(stages[knob.entry.name], knob.name) if knob.entry.name in stages else knob.default
            for knob in self.registry.knobs.values()
        }

    # Named stages.

    def _named_candidates(self) -> list[_Candidate]:
        made = (self._from_spec(index, spec) for index, spec in enumerate(self.stages))
        return [candidate for candidate in made if candidate is not None]

    def _from_spec(self, index: int, spec: StageSpec) -> _Candidate | None:
        path = f"stages[{index}]"
        if (entry := self._entry(f"{path}.name", spec.name)) is None:
            return None
        try:
            return _Candidate(entry, build_stage(entry.cls, spec.parameters), spec.explicit, path, named=True)
        except ParameterError as error:
            self.violations += error.violations(f"{path}.parameters")
        except BaseException as error:
            reraise_interrupt(error)
            raise StageError(entry.plugin, entry.name, f"raised {reason_of(error)}") from error
        return None

    def _entry(self, path: str, name: str) -> StageEntry | None:
        try:
            return self.registry.get(name)
        except KeyError as error:
            self._refuse(path, str(error.args[0]))
            return None

    def _without_rivals(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Drop defaults where the request itself names the stage; refuse a knob and a named stage of one name."""
        named = {candidate.name for candidate in candidates if candidate.named and candidate.explicit}
        asked = named | {candidate.name for candidate in candidates if candidate.explicit}
        for candidate in candidates:
            if candidate.explicit and not candidate.named and candidate.name in named:
                self._refuse(
                    candidate.field, f"and a stage {candidate.name!r} in `stages` say the same twice; drop one"
                )
        return [candidate for candidate in candidates if candidate.explicit or candidate.name not in asked]

    # Order.

    def _by_default(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Masks, penalties, temperature, other transforms, top_k, top_p, min_p, other filters, select.

        Named stages of one kind keep the order in which the request gives them, whatever their places.
        """
        ranks: list[tuple[int, int]] = []
        latest: dict[Kind, tuple[int, int]] = {}
        for candidate in candidates:
            rank = _rank(candidate.entry)
            if candidate.named:
                rank = latest[candidate.entry.kind] = max(rank, latest.get(candidate.entry.kind, rank))
            ranks.append(rank)
        order = sorted(range(len(candidates)), key=lambda index: (ranks[index], index))
        return [candidates[index] for index in order]

    def _by_order(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """The candidates in the request's own order, without those of a preset or the defaults that it leaves out."""
        by_name = {candidate.name: candidate for candidate in candidates}
        self._refuse_twice(candidates)
        names = list(self.order or ())
        for candidate in candidates:
            if candidate.explicit and candidate.name not in names:
                self._refuse("order", f"leaves out {candidate.name!r}, which {candidate.field} asks for")
        placed = [self._placed(index, name, by_name) for index, name in enumerate(names)]
        return [candidate for candidate in placed if candidate is not None]

    def _refuse_twice(self, candidates: Sequence[_Candidate]) -> None:
        for name, count in Counter(candidate.name for candidate in candidates).items():
            if count > 1:
                self._refuse("stages", f"name {name!r} {count} times; an order cannot tell them apart")

    def _placed(self, index: int, name: str, by_name: Mapping[str, _Candidate]) -> _Candidate | None:
        """The stage at one place of the order; None if it is unknown, repeated, or left off by its knobs."""
        path = f"order[{index}]"
        if name in (self.order or ())[:index]:
            self._refuse(path, f"names {name!r} a second time")
            return None
        if name in by_name:
            return by_name[name]
        if (entry := self._entry(path, name)) is None or any(
            knob.entry is entry and knob.off for knob in self.registry.knobs.values()
        ):
            return None  # a stage with knobs of its own is on or off by them
        try:
            return _Candidate(entry, build_stage(entry.cls, {}), True, path, named=True)
        except ParameterError as error:
            self._refuse(
                path, "; ".join(f"{violation.field} {violation.message}" for violation in error.violations(""))
            )
            return None

    # Select.

    def _with_one_select(self, ordered: Sequence[_Candidate]) -> list[_Candidate]:
        """The chain with exactly one select, at its end."""
        selects = [candidate for candidate in ordered if candidate.entry.is_select]
        wanted = [select for select in selects if select.explicit] or selects
        for extra in wanted[1:]:
            self._refuse(
                extra.field, f"{extra.name!r} is a second select stage beside {wanted[0].name!r}; a chain has one"
            )
        stages = [one for one in ordered if not one.entry.is_select or any(one is select for select in wanted)]
        if not wanted:
            return [*stages, self._fallback("greedy" if any(stage.is_cold for stage in stages) else "categorical")]
        if stages[-1] is not wanted[0] and len(wanted) == 1:
            self._refuse("order", f"places {wanted[0].name!r} before other stages; the select comes last")
        return self._cooled(stages, wanted[0])

    def _cooled(self, stages: list[_Candidate], select: _Candidate) -> list[_Candidate]:
        """Settle a select that was asked for with a temperature that means greedy."""
        cold = next((stage for stage in stages if stage.is_cold), None)
        if cold is None or select.name == "greedy":
            return stages
        if select.entry.built_in:
            return [*stages[:-1], self._fallback("greedy")]
        if cold.explicit and select.explicit:
            self._refuse(
                cold.field, f"under {GREEDY_BELOW} means greedy, which leaves nothing to {select.name!r}; drop one"
            )
        return [stage for stage in stages if stage is not cold]

    def _fallback(self, name: str) -> _Candidate:
        entry = self.registry.get(name)
        return _Candidate(entry, entry.cls(), False, "stages")

    def _check(self, candidate: _Candidate) -> None:
        """Let a stage check its parameters against the model."""
        try:
            candidate.stage.check(self.model_info)
        except ValueError as error:
            self._refuse(*_located(candidate, reason_of(error).removeprefix("ValueError: ")))
        except BaseException as error:
            reraise_interrupt(error)
            entry = candidate.entry
            raise StageError(entry.plugin, entry.name, f"raised {reason_of(error)}") from error


def _located(candidate: _Candidate, reason: str) -> tuple[str, str]:
    """Field and message of a check's error: "words[3] must be short" is told at words[3]."""
    found = re.fullmatch(r"(\w+)((?:\[\d+\]|\.[^\s.]+)*) (must .*)", reason, re.DOTALL)
    if found is None or found[1] not in candidate.entry.cls.model_fields:
        return (f"{candidate.field}.parameters" if candidate.is_placed else candidate.field), reason
    place = found[1] + found[2]
    return (f"{candidate.field}.parameters.{place}" if candidate.is_placed else place), found[3]


def _rank(entry: StageEntry) -> tuple[int, int]:
    """Place of a stage in the default order."""
    last = len(_FIRST_OF_KIND)
    within = _FIRST_OF_KIND.index(entry.name) if entry.built_in and entry.name in _FIRST_OF_KIND else last
    return _KIND_RANKS[entry.kind], within


def _extra_off(knob: KnobEntry) -> str:
    """The off values that the stage itself would refuse, for the message of a knob."""
    extra = []
    for value in knob.off:
        try:
            build_stage(knob.entry.cls, {knob.name: value})
        except ParameterError:
            extra.append(str(value))
    return " or ".join(extra)


def _without_idle(ordered: Sequence[_Candidate]) -> list[_Candidate]:
    """The chain without what cannot change a greedy choice.

    A temperature that means greedy leaves masks and penalties. Under greedy, stages at the end that keep the largest
    token largest are skipped; one before a stage that could change it stays, since it shapes what that stage sees.
    """
    *stages, select = ordered
    if not (select.entry.built_in and select.name == "greedy"):
        return list(ordered)
    if any(stage.is_cold for stage in stages):
        stages = [stage for stage in stages if stage.entry.kind in ("mask", "penalty")]
    while stages and stages[-1].entry.cls.argmax_invariant:
        stages.pop()
    return [*stages, select]


def _resolved(ordered: Sequence[_Candidate]) -> tuple[ResolvedStage, ...]:
    seen: Counter[str] = Counter()
    chain = []
    for candidate in ordered:
        entry = candidate.entry
        chain.append(ResolvedStage.of(candidate.stage, entry, seen[entry.name]))
        seen[entry.name] += 1
    return tuple(chain)
