"""Loads plugins one by one, so that a broken one is listed with its reason and never stops the server."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pluggy
from treadle_plugin_api import hookspecs
from treadle_plugin_api.backend_factory import BackendFactory, backend_problems
from treadle_plugin_api.contract import class_problems
from treadle_plugin_api.extras import MissingExtraError
from treadle_plugin_api.family import Family
from treadle_plugin_api.loss import Loss
from treadle_plugin_api.optimizer import Optimizer
from treadle_plugin_api.training_contract import loss_problems, optimizer_problems

from treadle_server.errors import PluginError
from treadle_server.model.families.registry import FamilyRegistry, family_problems
from treadle_server.plugins.discovery import PluginSource, installed_sources, local_sources
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.observers import Observers
from treadle_server.plugins.parts import PartEntry, PartRegistry, PartT
from treadle_server.plugins.registry import StageClass, StageEntry, StageRegistry, stage_knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginStatus:
    """One line of `treadle plugins`.

    Attributes:
        name: name of the plugin, as in `--no-plugin`.
        distribution: the installed distribution, or the path of a local plugin.
        version: the distribution's version; empty for a local plugin.
        status: active, passed (active, and the conformance suite found nothing), blocked (on request, not even
            imported), not installed (an optional dependency of its own is missing, which is no fault), or failed.
        reason: why it is not active; empty if it is.
        stages: the stages it brought, or would have brought.
        families: the model types it brought, or would have brought.
        losses: the losses it brought, or would have brought.
        optimizers: the optimizers it brought, or would have brought.
        backends: the compute backends it brought, or would have brought.
    """

    name: str
    distribution: str
    version: str
    status: Literal["active", "passed", "blocked", "not installed", "failed"]
    reason: str = ""
    stages: tuple[StageEntry, ...] = ()
    families: tuple[str, ...] = ()
    losses: tuple[PartEntry[Loss], ...] = ()
    optimizers: tuple[PartEntry[Optimizer], ...] = ()
    backends: tuple[PartEntry[BackendFactory], ...] = ()

    @property
    def is_faulty(self) -> bool:
        """Whether it failed by a fault, its own or of what it stands beside."""
        return self.status == "failed"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What became of one source: what it brings, or the reason why it brings nothing."""

    source: PluginSource
    module: object = None
    stages: tuple[StageEntry, ...] = ()
    families: tuple[Family, ...] = ()
    losses: tuple[PartEntry[Loss], ...] = ()
    optimizers: tuple[PartEntry[Optimizer], ...] = ()
    backends: tuple[PartEntry[BackendFactory], ...] = ()
    failure: str = ""
    lacks_extra: bool = False

    @property
    def names(self) -> set[str]:
        """What it registered, each name as others may not have it too."""
        return {
            *(f"stage {stage.name!r}" for stage in self.stages),
            *(f"model_type {family.model_type!r}" for family in self.families),
            *(f"loss {loss.name!r}" for loss in self.losses),
            *(f"optimizer {optimizer.name!r}" for optimizer in self.optimizers),
            *(f"backend {backend.name!r}" for backend in self.backends),
        }


@dataclass(frozen=True, slots=True)
class _Registered:
    """What a plugin registered, unchecked, in its order."""

    classes: list[StageClass] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    backends: list[BackendFactory] = field(default_factory=list)


class PluginManager:
    """Every plugin that was found, the registries of what they brought, and the hooks of the active ones.

    Attributes:
        plugins: the status of each plugin, in the order in which they were found.
        registry: the stages of the active ones.
        families: the built-in model families and those of the active ones.
        losses: the losses of the active ones.
        optimizers: the optimizers of the active ones.
        backends: the compute backends of the active ones; NumPy's is not among them.
        observers: those of the active ones that observe requests.
    """

    def __init__(self, sources: Iterable[PluginSource], *, blocked: Collection[str] = (), strict: bool = False) -> None:
        found = list(sources)
        _check_blocked(found, blocked)
        loaded = [_load(source) for source in found if not _is_blocked(source, blocked)]
        conflicts = _conflicts(loaded)
        self.plugins = tuple(_status(source, loaded, conflicts) for source in found)
        if strict:
            self.raise_failures()
        active = [one for one in loaded if not one.failure and one.source not in conflicts]
        self.registry = StageRegistry((stage for one in active for stage in one.stages), self._reasons())
        self.families = FamilyRegistry(family for one in active for family in one.families)
        self.losses = PartRegistry([loss for one in active for loss in one.losses], self._reasons("losses"))
        optimizers = [optimizer for one in active for optimizer in one.optimizers]
        self.optimizers = PartRegistry(optimizers, self._reasons("optimizers"))
        backends = [backend for one in active for backend in one.backends]
        self.backends = PartRegistry(backends, self._reasons("backends"))
        self.observers = Observers(_hooks(active))

    @classmethod
    def load(
        cls, plugin_dirs: Sequence[Path | str] = (), blocked: Collection[str] = (), strict: bool = False
    ) -> PluginManager:
        """Load what is installed and what lies in `plugin_dirs`, but for the plugins named in `blocked`.

        Raises PluginError for an unknown name in `blocked`, a missing folder, built-in stages that do not load, and, if
        `strict`, for any plugin that fails.
        """
        manager = cls([*installed_sources(), *local_sources(plugin_dirs)], blocked=blocked, strict=strict)
        manager.require_built_in()
        return manager

    def raise_failures(self) -> None:
        """Raise PluginError if a plugin failed, with every reason."""
        failures = [f"plugin {one.name!r}: {one.reason}" for one in self.plugins if one.is_faulty]
        if failures:
            raise PluginError("; ".join(failures))

    def _reasons(self, kind: Literal["stages", "losses", "optimizers", "backends"] = "stages") -> dict[str, str]:
        """Why what plugins bring cannot be named, by its name, or by that of the plugin that it may be in."""
        inactive = [one for one in self.plugins if one.status != "active"]
        names = [(one, name) for one in inactive for name in (one.name, *(part.name for part in getattr(one, kind)))]
        return {name: f"plugin {one.name!r} is {one.status}: {one.reason}" for one, name in names}

    def require_built_in(self) -> None:
        """Raise PluginError unless the selects that a chain falls back on are there."""
        missing = [name for name in ("greedy", "categorical") if name not in self.registry]
        if missing:
            reasons = "; ".join(one.reason for one in self.plugins if one.reason) or "treadle-samplers is not installed"
            raise PluginError(f"no token can be chosen without the built-in stages {', '.join(missing)}: {reasons}")


def _check_blocked(sources: Sequence[PluginSource], blocked: Collection[str]) -> None:
    known = {name for source in sources for name in (source.name, source.distribution)}
    if unknown := sorted(set(blocked) - known):
        names = ", ".join(sorted({source.name for source in sources})) or "none"
        raise PluginError(f"cannot block the unknown plugin {', '.join(map(repr, unknown))}; plugins found: {names}")


def _is_blocked(source: PluginSource, blocked: Collection[str]) -> bool:
    return source.name in blocked or source.distribution in blocked


def _load(source: PluginSource) -> _Loaded:
    """Import a plugin and collect what it brings; a failure becomes a reason."""
    try:
        module = source.load()
        found = _registered(source, module)
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything, even exit; the reason is listed
        reraise_interrupt(error)
        if isinstance(error, MissingExtraError):
            return _Loaded(source, failure=str(error), lacks_extra=True)
        return _Loaded(source, failure=reason_of(error))
    broken = {cls: problems for cls in found.classes if (problems := class_problems(cls))}
    stages = tuple(_entry(source, cls) for cls in found.classes if cls not in broken)
    problems = [
        *_problems(source, broken, stages),
        *family_problems(found.families),
        *loss_problems(found.losses),
        *optimizer_problems(found.optimizers),
        *backend_problems(found.backends),
    ]
    return _Loaded(
        source,
        module,
        stages,
        tuple(family for family in found.families if not family_problems([family])),
        tuple(_part(source, loss) for loss in found.losses if not any(loss_problems([loss]))),
        tuple(_part(source, one) for one in found.optimizers if not any(optimizer_problems([one]))),
        tuple(_part(source, one) for one in found.backends if not any(backend_problems([one]))),
        "; ".join(problems),
    )


def _registered(source: PluginSource, module: object) -> _Registered:
    """What the plugin registers, asked in a pluggy manager of its own: a bad hook harms no other plugin."""
    manager = _new_pluggy()
    manager.register(module, source.name)
    manager.check_pending()
    if not manager.get_hookcallers(module):
        raise PluginError(
            "implements no treadle hook: mark one with @hookimpl, such as treadle_register_stages(register)"
        )
    found = _Registered()
    manager.hook.treadle_register_stages(register=found.classes.append)
    manager.hook.treadle_register_families(register=found.families.append)
    manager.hook.treadle_register_losses(register=found.losses.append)
    manager.hook.treadle_register_optimizers(register=found.optimizers.append)
    manager.hook.treadle_register_backends(register=found.backends.append)
    return replace(found, classes=list(dict.fromkeys(found.classes)))  # the same class twice is once


def _new_pluggy() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _entry(source: PluginSource, cls: StageClass) -> StageEntry:
    return StageEntry(
        cls=cls,
        plugin=source.name,
        distribution=source.distribution,
        version=source.version,
        built_in=source.built_in,
    )


def _part(source: PluginSource, part: PartT) -> PartEntry[PartT]:
    return PartEntry(part, source.name, source.distribution, source.built_in)


def _problems(
    source: PluginSource, broken: Mapping[StageClass, Sequence[str]], stages: Sequence[StageEntry]
) -> Iterable[str]:
    """Reasons to refuse the stages of a plugin, all of them together; `broken` has those of single classes."""
    for cls, problems in broken.items():
        yield from (f"stage class {getattr(cls, '__name__', cls)}: {problem}" for problem in problems)
    for name in _repeated(stage.name for stage in stages):
        yield f"registers two stages called {name!r}"
    if not source.built_in:
        for knob in itertools.chain.from_iterable(map(stage_knobs, stages)):
            yield f"stage {knob.entry.name!r}: only built-in stages have plain knobs; drop Knob from {knob.name!r}"


def _repeated(names: Iterable[str]) -> list[str]:
    seen = list(names)
    return sorted({name for name in seen if seen.count(name) > 1})


def _conflicts(loaded: Sequence[_Loaded]) -> Mapping[PluginSource, str]:
    """Why plugins that loaded well cannot be active beside others: each name has one owner."""
    owners: defaultdict[str, list[PluginSource]] = defaultdict(list)
    for one in loaded:
        for name in one.names:
            owners[name].append(one.source)
    reasons: defaultdict[PluginSource, list[str]] = defaultdict(list)
    for name, sources in owners.items():
        built_in = next((source for source in sources if source.built_in), None)
        rivals = [source for source in sources if not source.built_in]
        for source in rivals if built_in or len(rivals) > 1 else ():
            others = [built_in] if built_in else [rival for rival in rivals if rival is not source]
            what = "is built in" if built_in else "is also registered by another plugin"
            reasons[source].append(f"{name} of {source} {what}: {', '.join(map(str, others))}")
    return {source: "; ".join(all_reasons) for source, all_reasons in reasons.items()}


def _status(source: PluginSource, loaded: Sequence[_Loaded], conflicts: Mapping[PluginSource, str]) -> PluginStatus:
    blocked = _Loaded(source, failure="blocked on request")
    one = next((one for one in loaded if one.source is source), blocked)
    reason = one.failure or conflicts.get(source, "")
    return PluginStatus(
        name=source.name,
        distribution=source.distribution,
        version=source.version,
        status="blocked" if one is blocked else _outcome(one, reason),
        reason=reason,
        stages=one.stages,
        families=tuple(family.model_type for family in one.families),
        losses=one.losses,
        optimizers=one.optimizers,
        backends=one.backends,
    )


def _outcome(one: _Loaded, reason: str) -> Literal["active", "not installed", "failed"]:
    if not reason:
        return "active"
    return "not installed" if one.lacks_extra else "failed"


def _hooks(active: Sequence[_Loaded]) -> pluggy.HookRelay:
    manager = _new_pluggy()
    for one in active:
        manager.register(one.module, f"{one.source.name} ({one.source.distribution})")
    return manager.hook
