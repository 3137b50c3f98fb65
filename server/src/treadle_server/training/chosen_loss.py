"""A loss chosen by name, with its options; what a plugin's returns is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from treadle_plugin_api.backend import Array
from treadle_plugin_api.loss import Loss, MissingTargetError, RowLosses, Targets
from treadle_plugin_api.training_contract import keyword_options, loss_problem

from treadle_server.errors import InvalidRequestError, TrainingError
from treadle_server.plugins.foreign_code import reason_of, reraise_interrupt
from treadle_server.plugins.parts import PartEntry, PartRegistry
from treadle_server.training.options import is_number

ChosenLoss = Callable[[Array, Targets], RowLosses]


def choose_loss(
    losses: PartRegistry[Loss],
    name: str,
    options: Mapping[str, float],
    faster: Callable[[Callable[..., RowLosses]], Callable[..., RowLosses]],
) -> ChosenLoss:
    """Return the named loss with its options, in the fastest form that there is. Raises InvalidRequestError.

    Called, it raises InvalidRequestError for targets that it lacks, and TrainingError when a plugin's raises or returns
    anything but finite arrays of the right shapes.
    """
    try:
        entry = losses.get(name)
    except KeyError as error:
        raise InvalidRequestError.of("loss", error.args[0]) from None
    _check_options(entry.part, options)
    function = faster(entry.part.function)

    def call(logits: Array, targets: Targets) -> RowLosses:
        try:
            result = function(logits, targets, **options)
        except MissingTargetError as error:
            raise InvalidRequestError.of(error.field, str(error)) from error
        except BaseException as error:
            raise _failure(entry, error) from error
        if not entry.built_in and (problem := loss_problem(logits, result)) is not None:
            raise TrainingError(f"{entry.owner} {problem}: nothing was changed")
        return result

    return call


def _failure(entry: PartEntry[Loss], error: BaseException) -> BaseException:
    reraise_interrupt(error)
    if entry.built_in:
        return error
    return TrainingError(f"{entry.owner} raised {reason_of(error)}: nothing was changed")


def _check_options(loss: Loss, options: Mapping[str, float]) -> None:
    known = keyword_options(loss.function)
    for option, value in options.items():
        if option not in known:
            listing = ", ".join(known) or "none"
            raise InvalidRequestError.of(option, f"is no option of {loss.name}; its options: {listing}")
        low, high = loss.ranges.get(option, (-math.inf, math.inf))
        if not (is_number(value) and low <= value <= high):
            raise InvalidRequestError.of(option, f"must be {low:g} to {high:g}, but is {value!r:.80}")
