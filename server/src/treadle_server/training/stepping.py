"""An optimizer and its state, and steps that happen whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.optimizer import Optimizer

from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.parts import PartEntry, PartRegistry
from treadle_server.training.options import check_options
from treadle_server.training.threads import BlasThreads

OptimizerState = dict[str, list[Array]]
# Numbers of a tensor that a thread takes at once.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step is done with.

    Attributes:
        step: its number, from 1.
        factor: what gradients are multiplied by first.
        lr: the learning rate.
        weight_decay: of all parameters but the spared.
        spared: names of parameters without weight decay.
        options: further ones of the optimizer.
    """

    step: int
    factor: float
    lr: float
    weight_decay: float
    spared: frozenset[str]
    options: Mapping[str, object]


class Stepper:
    """A chosen optimizer.

    Attributes:
        state: its arrays by parameter, of those that a step has changed.
    """

    def __init__(
        self,
        optimizers: PartRegistry[Optimizer],
        name: str,
        threads: BlasThreads,
        faster: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        try:
            self._entry = optimizers.get(name)
        except KeyError as error:
            raise InvalidRequestError.of("optimizer", error.args[0]) from None
        self._optimizer: Optimizer = self._entry.part
        self._threads, self._function = threads, faster(self._optimizer.apply)
        self.state: OptimizerState = {}

    @property
    def name(self) -> str:
        """What the optimizer is called."""
        return self._optimizer.name

    @property
    def is_trusted(self) -> bool:
        """Whether its steps cannot fail and treat every number by itself: the server's own."""
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
        """Change the parameters that have gradients, which are used up by the server's own optimizers.

        Raises TrainingError, nothing changed, when a plugin's fails.
        """
        if self.is_trusted:
            pieces = [piece for name in gradients for piece in self._pieces(name, parameters[name], gradients[name])]
            self._threads.each(lambda piece: self._apply(*piece, settings), pieces)
            return
        before = dict(self.state)
        undo: list[tuple[Array, Array]] = []
        try:
            for name, gradient in gradients.items():
                arrays = (parameters[name], *self._state_of(name, parameters[name]))
                undo += [(array, array.copy()) for array in arrays]
                self._apply(name, (arrays[0], gradient.copy(), *arrays[1:]), settings)
                if not all(np.isfinite(array).all() for array in arrays):
                    raise TrainingError(f"{self._entry.owner} made {file_name(name)} not finite: nothing was changed")
        except BaseException as error:
            for array, old in undo:
                array[...] = old
            self.state = before
            raise _failure(self._entry, error) from error

    def _pieces(self, name: str, parameter: Array, gradient: Array) -> Iterator[tuple[str, Sequence[Array]]]:
        """Yield the name with runs of numbers of parameter, gradient and state."""
        flat = [array.reshape(-1) for array in (parameter, gradient, *self._state_of(name, parameter))]
        for start in range(0, parameter.size, PIECE):
            yield name, [array[start : start + PIECE] for array in flat]

    def _apply(self, name: str, arrays: Sequence[Array], settings: StepSettings) -> None:
        parameter, gradient, *state = arrays
        if settings.factor != 1.0:
            np.multiply(gradient, settings.factor, out=gradient)
        decay = 0.0 if name in settings.spared else settings.weight_decay
        options = {"lr": settings.lr, "weight_decay": decay, **settings.options}
        self._function(parameter, gradient, state, settings.step, **options)

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
