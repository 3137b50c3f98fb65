"""Training: losses, optimizers, schedules and the trainer that takes a model from its folder to a better one."""

from treadle_server.training.trainer import LossResult, StepResult, Trainer

__all__ = ["LossResult", "StepResult", "Trainer"]
