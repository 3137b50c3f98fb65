"""Training: losses, optimizers, schedules and the trainer that takes a model from its folder to a better one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle_server.training.lora import LoraConfig
    from treadle_server.training.results import LossResult, StepResult
    from treadle_server.training.trainer import Trainer

__all__ = ["LoraConfig", "LossResult", "StepResult", "Trainer"]


def __getattr__(name: str) -> object:
    """Import on first use: a server needs the names of the losses and optimizers, not the trainer."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treadle_server.training import lora, results, trainer

    return getattr({"LoraConfig": lora, "Trainer": trainer}.get(name, results), name)
