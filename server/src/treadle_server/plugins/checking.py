"""Runs the conformance suite over the stages, losses and optimizers of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from treadle_plugin_api.testing import check_loss, check_optimizer, check_stage

from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.manager import PluginStatus
from treadle_server.plugins.registry import StageEntry


def checked(plugin: PluginStatus) -> PluginStatus:
    """The plugin, failed if something it brings does not keep the contract with its defaults.

    What is built in is not run: treadle's own tests have done that.
    """
    if plugin.status != "active":
        return plugin
    problems = list(_problems(plugin))
    return replace(plugin, status="failed", reason="; ".join(problems)) if problems else plugin


def _problems(plugin: PluginStatus) -> Iterator[str]:
    for stage in plugin.stages:
        if not stage.built_in and (problem := stage_problem(stage)):
            yield problem
    for loss in plugin.losses:
        if not loss.built_in and (problem := _problem(loss.owner, check_loss, loss.part)):
            yield problem
    for optimizer in plugin.optimizers:
        if not optimizer.built_in and (problem := _problem(optimizer.owner, check_optimizer, optimizer.part)):
            yield problem


def stage_problem(stage: StageEntry) -> str:
    """What the suite finds wrong with a stage; empty if nothing."""
    return _problem(f"stage {stage.name!r}", check_stage, stage.cls)


def _problem(name: str, check: Callable[[Any], None], part: object) -> str:
    """What a check finds wrong; empty if nothing. Foreign code may raise anything."""
    try:
        check(part)
    except AssertionError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - foreign code
        reraise_interrupt(error)
        return f"{name} raised {reason_of(error)}"
    return ""
