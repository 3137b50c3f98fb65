"""Options of optimizers: the keyword arguments of their functions, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TypeGuard

from treadle_plugin_api.training_contract import keyword_options

from treadle_server.errors import InvalidRequestError

_COMMON = ("lr", "weight_decay")
# A number without a gradient, of a token that no batch had, is 0 / eps: NaN where float32 rounds eps to 0.
_SMALLEST_EPS = 1e-30


def check_options(
    optimizer: str, function: Callable[..., object], numbers: Mapping[str, float], options: Mapping[str, object]
) -> None:
    """Raise InvalidRequestError for an option that the optimizer lacks or a value out of range."""
    for name, value in numbers.items():
        if not (is_number(value) and value >= 0 and (value > 0 or name != "grad_clip_norm")):
            least = "over 0" if name == "grad_clip_norm" else "0 or more"
            raise InvalidRequestError.of(name, f"must be finite and {least}, but is {value!r:.80}")
    known = [name for name in keyword_options(function) if name not in _COMMON]
    for name, option in options.items():
        if name not in known:
            raise InvalidRequestError.of(name, f"is no option of {optimizer}; its options: {', '.join(known)}")
        if name == "betas":
            _check_betas(option)
        elif not is_number(option) or option < 0:
            raise InvalidRequestError.of(name, f"must be a finite number, 0 or more, but is {option!r:.80}")
        elif name == "eps" and option < _SMALLEST_EPS:
            raise InvalidRequestError.of(name, f"must be {_SMALLEST_EPS:g} or more, but is {option}")


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def _check_betas(value: object) -> None:
    betas = tuple(value) if isinstance(value, tuple | list) else ()
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise InvalidRequestError.of("betas", f"must be two numbers from 0 to below 1, but is {value!r}")
