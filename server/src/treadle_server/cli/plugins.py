"""`treadle plugins`: lists the plugins, and why one is not active."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_server.cli.failure import client_failures, wrong_use
from treadle_server.cli.options import Json, NoPlugins, PluginDirs, Target
from treadle_server.cli.output import write_json, write_table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    distribution: str
    version: str
    status: str
    reason: str
    stages: tuple[str, ...]


def plugins(
    target: Target = None, plugin_dir: PluginDirs = None, no_plugin: NoPlugins = None, as_json: Json = False
) -> None:
    """List the sampler plugins with their stages, and the reason where one is not active."""
    if target is not None and (plugin_dir or no_plugin):
        raise wrong_use("--plugin-dir and --no-plugin list the plugins of this machine and cannot go with --target")
    rows = _local_plugins(plugin_dir or [], no_plugin or []) if target is None else _served_plugins(target)
    if as_json:
        write_json(rows)
    else:
        cells = [[r.name, r.distribution, r.version, r.status, ", ".join(r.stages), r.reason] for r in rows]
        write_table(["plugin", "distribution", "version", "status", "stages", "reason"], cells)


def _local_plugins(plugin_dirs: PluginDirs, no_plugins: NoPlugins) -> list[_Row]:
    from treadle_server.plugins.discovery import installed_sources, local_sources
    from treadle_server.plugins.manager import PluginManager

    sources = [*installed_sources(), *local_sources(plugin_dirs or ())]
    return [
        _Row(
            name=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            status=plugin.status,
            reason=plugin.reason,
            stages=tuple(stage.name for stage in plugin.stages),
        )
        for plugin in PluginManager(sources, blocked=no_plugins or ()).plugins
    ]


def _served_plugins(target: str) -> list[_Row]:
    from treadle_client import Client

    with client_failures(target), Client(target) as client:
        served = client.list_samplers().plugins
    return [
        _Row(
            name=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            status=plugin.status,
            reason=plugin.reason,
            stages=plugin.stages,
        )
        for plugin in served
    ]
