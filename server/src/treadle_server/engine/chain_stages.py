"""A stage as a request names it, and as it stands in the request's chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle_plugin_api import SamplingContext, Select, Stage
from treadle_plugin_api.contract import has_override
from treadle_plugin_api.sampling import Kind

from treadle_server.errors import ConstraintError, StageError
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.registry import StageEntry


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage named in a request.

    Attributes:
        name: name of the stage.
        parameters: its parameters; those left out take their defaults.
        explicit: False for a stage that a preset brought, which gives way where the request says otherwise.
    """

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    explicit: bool = True


@dataclass(frozen=True, slots=True)
class ResolvedStage:
    """One stage of a chain, with its parameters.

    Attributes:
        stage: the stage itself.
        entry: its class in the registry.
        key: key of its random stream.
        is_batched: whether many rows may go through it at once.
        accepts: whether it has a state that each chosen token advances.
    """

    stage: Stage | Select
    entry: StageEntry
    key: int
    is_batched: bool
    accepts: bool

    @classmethod
    def of(cls, stage: Stage | Select, entry: StageEntry, occurrence: int = 0) -> ResolvedStage:
        """Return a stage as the `occurrence`-th of its name in a chain."""
        return cls(stage, entry, entry.key(occurrence), entry.is_batched, has_override(entry.cls, "accept"))

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.entry.name

    @property
    def kind(self) -> Kind:
        """Kind of the stage."""
        return self.entry.kind

    @property
    def plugin(self) -> str:
        """Name of the plugin it came from."""
        return self.entry.plugin

    def start(self, context: SamplingContext) -> Any:
        """State for a new choice; StageError if the stage fails."""
        context.enter(self.key)
        return self._guarded(self.stage.start, context)

    def accept(self, state: Any, token_id: int) -> None:
        """Advance the state by the chosen token; StageError if the stage fails."""
        if self.accepts:
            self._guarded(self.stage.accept, state, token_id)

    def clone(self, state: Any) -> Any:
        """Copy of the state; StageError if the stage fails."""
        return None if state is None else self._guarded(self.stage.clone, state)

    def error(self, reason: str | BaseException) -> StageError:
        """The error that names this stage and its plugin; a built-in one raises where a request contradicts itself."""
        if self.entry.built_in and isinstance(reason, ValueError | RuntimeError):
            why = reason_of(reason).partition(": ")[2]
            return ConstraintError(self.plugin, self.name, f"cannot be satisfied: {why}")
        if isinstance(reason, BaseException):
            reason = f"raised {reason_of(reason)}"
        return StageError(self.plugin, self.name, reason)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:
            reraise_interrupt(error)
            raise self.error(error) from error
