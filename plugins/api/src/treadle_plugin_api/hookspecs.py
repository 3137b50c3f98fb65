"""The hooks a plugin may implement. pluggy calls them once, when the server starts, and never per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from treadle_plugin_api.sampling import Select, Stage

PROJECT = "treadle"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Call `register(cls)` once for each sampler stage class of the plugin.

    Either every class registered here becomes available, or none: one that is broken makes the plugin `failed`.
    """
