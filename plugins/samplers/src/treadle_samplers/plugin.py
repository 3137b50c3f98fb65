"""The entry point of the distribution."""

from __future__ import annotations

from collections.abc import Callable

from treadle_plugin_api import Select, Stage, hookimpl

import treadle_samplers


@hookimpl
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Register every built-in stage, in the order in which equal kinds run by default."""
    for name in treadle_samplers.__all__:
        register(getattr(treadle_samplers, name))
