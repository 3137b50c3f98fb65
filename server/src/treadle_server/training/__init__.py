"""Training: losses, optimizers, schedules and the trainer that takes a model from its folder to a better one."""

from treadle_server.training.lora import LoraConfig
from treadle_server.training.results import LossResult, StepResult
from treadle_server.training.trainer import Trainer

__all__ = ["LoraConfig", "LossResult", "StepResult", "Trainer"]
