"""An optimizer and its state, and steps that happen whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.optimizer import Optimizer

from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.parts import PartEntry, PartRegistry
from treadle_server.training.options import check_options

OptimizerState = dict[str, list[Array]]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step is done with.

    Attributes:
        step: its number, from 1.
        lr: the learning rate.
        weight_decay: of all parameters but the spared.
        spared: names of parameters without weight decay.
        options: further ones of the optimizer.
    """

    step: int
    lr: float
    weight_decay: float
    spared: frozenset[str]
    options: Mapping[str, object]


class Stepper:
    """A chosen optimizer.

    Attributes:
        state: its arrays by parameter, of those that a step has changed.
    """

    def __init__(self, optimizers: PartRegistry[Optimizer], name: str) -> None:
        try:
            self._entry = optimizers.get(name)
        except KeyError as error:
            raise InvalidRequestError.of("optimizer", error.args[0]) from None
        self._optimizer: Optimizer = self._entry.part
        self.state: OptimizerState = {}

    @property
    def name(self) -> str:
        """What the optimizer is called."""
        return self._optimizer.name

    @property
    def is_trusted(self) -> bool:
        """Whether its steps cannot fail, so that gradients may be used up."""
        return self._entry.built_in

    def check(self, numbers: Mapping[str, float], options: Mapping[str, object]) -> None:
        """Raise InvalidRequestError for an option that the optimizer lacks or a value out of range."""
        check_options(self.name, self._optimizer.apply, numbers, options)

    def step(
        self,
        parameters: Mapping[str, Array],
        gradients: Mapping[str, Array],
        settings: StepSettings,
        file_name: Callable[[str], str],
    ) -> None:
        """Change the parameters that have gradients. Raises TrainingError, nothing changed, when a plugin's fails."""
        if self.is_trusted:
            for name, gradient in gradients.items():
                self._apply(parameters[name], gradient, self._state_of(name, parameters[name]), name, settings)
            return
        before = dict(self.state)
        undo: list[tuple[Array, Array]] = []
        try:
            for name, gradient in gradients.items():
                arrays = (parameters[name], *self._state_of(name, parameters[name]))
                undo += [(array, array.copy()) for array in arrays]
                self._apply(parameters[name], gradient, list(arrays[1:]), name, settings)
                if not all(np.isfinite(array).all() for array in arrays):
                    raise TrainingError(f"{self._entry.owner} made {file_name(name)} not finite: nothing was changed")
        except BaseException as error:
            for array, old in undo:
                array[...] = old
            self.state = before
            raise _failure(self._entry, error) from error

    def _apply(self, parameter: Array, gradient: Array, state: list[Array], name: str, settings: StepSettings) -> None:
        decay = 0.0 if name in settings.spared else settings.weight_decay
        options = {"lr": settings.lr, "weight_decay": decay, **settings.options}
        self._optimizer.apply(parameter, gradient, state, settings.step, **options)

    def _state_of(self, name: str, parameter: Array) -> list[Array]:
        if name not in self.state:
            self.state[name] = [np.zeros_like(parameter) for _ in self._optimizer.state_names]
        return self.state[name]

    # ---- files ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Array]:
        """Return the state under the names of a state file."""
        return {
            f"{state_name}/{name}": array
            for name, arrays in self.state.items()
            for state_name, array in zip(self._optimizer.state_names, arrays, strict=True)
        }

    def read(
        self,
        folder: Path,
        tensors: Mapping[str, Array],
        parameters: Mapping[str, Array],
        file_name: Callable[[str], str],
    ) -> OptimizerState:
        """Return the state of the tensors of a state file. Raises CheckpointError when it does not fit."""
        state: OptimizerState = {}
        for name, parameter in parameters.items():
            found = [tensors.get(f"{state_name}/{name}") for state_name in self._optimizer.state_names]
            kept = [array.astype(parameter.dtype) for array in found if array is not None]
            if not kept:
                continue  # frozen, or no step was done
            if len(kept) < len(found) or any(array.shape != parameter.shape for array in kept):
                raise CheckpointError(f"{folder}: the optimizer's state of {file_name(name)} does not fit")
            state[name] = kept
        return state


def _failure(entry: PartEntry[Optimizer], error: BaseException) -> BaseException:
    reraise_interrupt(error)
    if isinstance(error, TrainingError):
        return error
    return TrainingError(f"{entry.owner} raised {reason_of(error)}: nothing was changed")
