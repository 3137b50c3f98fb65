"""Runs the conformance suite over the stages of plugins."""

from __future__ import annotations

from dataclasses import replace

from treadle_plugin_api.testing import check_stage

from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.manager import PluginStatus
from treadle_server.plugins.registry import StageEntry


def checked(plugin: PluginStatus) -> PluginStatus:
    """The plugin, failed if a stage of it with its default parameters does not keep the contract.

    The built-in stages are not run: treadle's own tests have done that.
    """
    if plugin.status != "active":
        return plugin
    problems = [problem for stage in plugin.stages if not stage.built_in and (problem := stage_problem(stage))]
    return replace(plugin, status="failed", reason="; ".join(problems)) if problems else plugin


def stage_problem(stage: StageEntry) -> str:
    """What the suite finds wrong with a stage; empty if nothing. Foreign code may raise anything."""
    try:
        check_stage(stage.cls)
    except AssertionError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - foreign code
        reraise_interrupt(error)
        return f"stage {stage.name!r} raised {reason_of(error)}"
    return ""
