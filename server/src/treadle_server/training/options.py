"""Options of optimizers: the keyword arguments of their functions, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from treadle_plugin_api.training_contract import keyword_options

from treadle_server.errors import InvalidRequestError

_COMMON = ("lr", "weight_decay")


def check_options(
    optimizer: str, function: Callable[..., object], numbers: Mapping[str, float], options: Mapping[str, object]
) -> None:
    """Raise InvalidRequestError for an option that the optimizer lacks or a value out of range."""
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0 and (value > 0 or name != "grad_clip_norm")):
            least = "over 0" if name == "grad_clip_norm" else "0 or more"
            raise InvalidRequestError.of(name, f"must be finite and {least}, but is {value}")
    known = [name for name in keyword_options(function) if name not in _COMMON]
    for name, option in options.items():
        if name not in known:
            raise InvalidRequestError.of(name, f"is no option of {optimizer}; its options: {', '.join(known)}")
        if name == "betas":
            _check_betas(option)
        elif not isinstance(option, int | float) or not math.isfinite(option) or option < 0:
            raise InvalidRequestError.of(name, f"must be a finite number, 0 or more, but is {option!r}")


def _check_betas(value: object) -> None:
    betas = tuple(value) if isinstance(value, tuple | list) else ()
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise InvalidRequestError.of("betas", f"must be two numbers from 0 to below 1, but is {value!r}")
