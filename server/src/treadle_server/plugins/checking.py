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
    """The plugin, passed or failed as what it brings keeps the contract with its defaults.

    What is built in is not run: treadle's own tests have done that. A plugin of which nothing is run stays as it was.
    """
    if plugin.status != "active":
        return plugin
    found = list(_findings(plugin))
    problems = [problem for problem in found if problem]
    if problems:
        return replace(plugin, status="failed", reason="; ".join(problems))
    return replace(plugin, status="passed") if found else plugin


def _findings(plugin: PluginStatus) -> Iterator[str]:
    """Yield what the suite finds wrong with each part that it can check; empty if nothing."""
    for stage in plugin.stages:
        if not stage.built_in:
            yield stage_problem(stage)
    for loss in plugin.losses:
        if not loss.built_in:
            yield _problem(loss.owner, check_loss, loss.part)
    for optimizer in plugin.optimizers:
        if not optimizer.built_in:
            yield _problem(optimizer.owner, check_optimizer, optimizer.part)


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
