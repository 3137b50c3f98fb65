"""The built-in losses and optimizers, brought through the same door as anyone's."""

from __future__ import annotations

from collections.abc import Callable

from treadle_plugin_api import hookimpl
from treadle_plugin_api.loss import Loss
from treadle_plugin_api.optimizer import Optimizer

from treadle_server.training.losses import LOSSES
from treadle_server.training.optimizers import OPTIMIZERS


@hookimpl
def treadle_register_losses(register: Callable[[Loss], None]) -> None:
    """Register cross_entropy, importance_sampling and ppo."""
    for loss in LOSSES.values():
        register(loss)


@hookimpl
def treadle_register_optimizers(register: Callable[[Optimizer], None]) -> None:
    """Register adamw, sgd and lion."""
    for optimizer in OPTIMIZERS.values():
        register(optimizer)
