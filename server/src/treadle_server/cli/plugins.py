"""`treadle plugins`: lists the plugins, and why one is not active."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from treadle_server.cli.failure import FAILED, client_failures, wrong_use
from treadle_server.cli.options import Json, NoPlugins, PluginDirs, ServedTarget
from treadle_server.cli.output import write_json, write_table
from treadle_server.cli.security import ConnectionFlags

if TYPE_CHECKING:
    from treadle_server.plugins import PluginStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    distribution: str
    version: str
    status: str
    reason: str
    stages: tuple[str, ...]
    families: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    num_slow_calls: int = 0

    @property
    def brought(self) -> tuple[str, ...]:
        return (*self.stages, *self.families, *self.losses, *self.optimizers, *self.backends)


def plugins(
    connection: ConnectionFlags,
    target: ServedTarget = None,
    plugin_dir: PluginDirs = None,
    no_plugin: NoPlugins = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the conformance suite too; exit with 1 if a plugin fails.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the plugins with what they bring, and the reason where one is not active."""
    if target is not None and (plugin_dir or no_plugin or check):
        raise wrong_use("--plugin-dir, --no-plugin and --check are for the plugins of this machine, not for --target")
    if target is not None:
        _write(_served_plugins(target, connection), as_json=as_json)
        return
    connection.refuse_without_target()
    found = _local_plugins(plugin_dir, no_plugin, check=check)
    _write([_row(plugin) for plugin in found], as_json=as_json)
    if check and any(plugin.is_faulty for plugin in found):
        raise typer.Exit(FAILED)


def _write(rows: list[_Row], *, as_json: bool) -> None:
    if as_json:
        write_json(rows)
    else:
        cells = [[r.name, r.distribution, r.version, r.status, ", ".join(r.brought), r.reason] for r in rows]
        write_table(["plugin", "distribution", "version", "status", "brings", "reason"], cells)


def _local_plugins(plugin_dirs: PluginDirs, no_plugins: NoPlugins, *, check: bool) -> list[PluginStatus]:
    from treadle_server.plugins.checking import checked
    from treadle_server.plugins.discovery import installed_sources, local_sources
    from treadle_server.plugins.manager import PluginManager

    sources = [*installed_sources(), *local_sources(plugin_dirs or ())]
    found = PluginManager(sources, blocked=no_plugins or ()).plugins
    return [checked(plugin) if check else plugin for plugin in found]


def _row(plugin: PluginStatus) -> _Row:
    return _Row(
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        status=plugin.status,
        reason=plugin.reason,
        stages=tuple(stage.name for stage in plugin.stages),
        families=plugin.families,
        losses=tuple(loss.name for loss in plugin.losses),
        optimizers=tuple(optimizer.name for optimizer in plugin.optimizers),
        backends=tuple(backend.name for backend in plugin.backends),
    )


def _served_plugins(target: str, connection: ConnectionFlags) -> list[_Row]:
    with client_failures(target), connection.client(target) as client:
        served = client.list_samplers()
    return [
        _Row(
            name=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            status=plugin.status.replace("_", " "),
            reason=plugin.reason,
            stages=plugin.stages,
            families=plugin.families,
            losses=plugin.losses,
            optimizers=plugin.optimizers,
            backends=plugin.backends,
            num_slow_calls=sum(stage.num_slow_calls for stage in served.samplers if stage.plugin == plugin.name),
        )
        for plugin in served.plugins
    ]
