"""The hooks a plugin may implement: five that register, called once at start, and two that observe requests.

None is called per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from treadle_plugin_api.backend_factory import BackendFactory
    from treadle_plugin_api.family import Family
    from treadle_plugin_api.loss import Loss
    from treadle_plugin_api.observers import RequestInfo, RequestResult
    from treadle_plugin_api.optimizer import Optimizer
    from treadle_plugin_api.sampling import Select, Stage

PROJECT = "treadle"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Call `register(cls)` once for each sampler stage class of the plugin.

    Either every class registered here becomes available, or none: one that is broken makes the plugin `failed`.
    """


@hookspec
def treadle_register_families(register: Callable[[Family], None]) -> None:
    """Call `register(family)` once for each model family of the plugin.

    Folders whose config.json has the family's `model_type` load from then on. A name that another family has makes the
    plugin `failed`: numbers must not depend on what else is installed.
    """


@hookspec
def treadle_register_losses(register: Callable[[Loss], None]) -> None:
    """Call `register(loss)` once for each loss of the plugin.

    Trainers take it by its name from then on. A name that another loss has makes the plugin `failed`.
    """


@hookspec
def treadle_register_optimizers(register: Callable[[Optimizer], None]) -> None:
    """Call `register(optimizer)` once for each optimizer of the plugin.

    Trainers take it by its name from then on. A name that another optimizer has makes the plugin `failed`.
    """


@hookspec
def treadle_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Call `register(factory)` once for each compute backend of the plugin.

    Models are loaded with it by its name from then on. A name that another backend has makes the plugin `failed`.
    """


@hookspec
def treadle_request_started(request: RequestInfo) -> None:
    """See a generation that was checked and queued. Called once for each, before its `treadle_request_finished`.

    Observers run one after the other on a thread of their own, so that none can slow a request down. What one raises is
    logged once and hurts nobody. While they lag far behind, requests go by unobserved; that is logged too.
    """


@hookspec
def treadle_request_finished(result: RequestResult) -> None:
    """See how a generation ended: with its last token, by an error, or because nobody wanted more of it."""
