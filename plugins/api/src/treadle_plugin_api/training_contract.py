"""The rules for losses and optimizers as checks: plugins are refused by them, and training guards foreign ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from treadle_plugin_api.backend import Array
from treadle_plugin_api.contract import NAME_PATTERN
from treadle_plugin_api.loss import Loss, RowLosses
from treadle_plugin_api.optimizer import Optimizer


def loss_problem(logits: Array, result: Any) -> str | None:
    """What is wrong with a loss's result for logits `[rows, vocab]` as they were given; None if nothing is."""
    if not isinstance(result, RowLosses):
        return f"returned {type(result).__name__}, not RowLosses"
    expected = {
        "losses": (logits.shape[:1], np.dtype(np.float64)),
        "dlogits": (logits.shape, logits.dtype),
        "logprobs": (logits.shape[:1], np.dtype(np.float64)),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(result, name)
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            return f"returned {name} as {found}, not {dtype} {list(shape)}"
        if not np.isfinite(array).all():
            return f"returned {name} with a NaN or an infinity in row {int(np.argwhere(~np.isfinite(array))[0][0])}"
    return None


def keyword_options(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def loss_problems(losses: Iterable[object]) -> Iterator[str]:
    """Yield every reason why losses cannot be registered."""
    seen: set[str] = set()
    for loss in losses:
        if not isinstance(loss, Loss):
            yield f"loss {loss!r:.80} is no treadle_plugin_api.loss.Loss"
            continue
        yield from _name_problems("loss", loss.name, seen)
        yield from _call_problems(f"loss {loss.name!r:.80}", loss.function, 2)
        yield from _range_problems(loss)


def optimizer_problems(optimizers: Iterable[object]) -> Iterator[str]:
    """Yield every reason why optimizers cannot be registered."""
    seen: set[str] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            yield f"optimizer {optimizer!r:.80} is no treadle_plugin_api.optimizer.Optimizer"
            continue
        what = f"optimizer {optimizer.name!r:.80}"
        yield from _name_problems("optimizer", optimizer.name, seen)
        yield from _call_problems(what, optimizer.apply, 4, ("lr", "weight_decay"))
        names = optimizer.state_names
        if not isinstance(names, tuple) or len(set(names)) < len(names) or not all(map(_is_name, names)):
            yield f"{what} has state_names {names!r:.80}, not a tuple of names that differ"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and NAME_PATTERN.fullmatch(name) is not None


def _name_problems(kind: str, name: object, seen: set[str]) -> Iterator[str]:
    if not _is_name(name):
        yield f"{kind} {name!r:.80} must be called by lower-case letters, digits and underscores"
    elif name in seen:
        yield f"{kind} {name!r} is registered twice"
    seen.add(str(name))


def _call_problems(what: str, function: object, num_arguments: int, keywords: tuple[str, ...] = ()) -> Iterator[str]:
    """Called as training calls it: a missing parameter is found here, not after a forward pass."""
    if not callable(function):
        yield f"{what} has {function!r:.80} where a function belongs"
        return
    try:
        inspect.signature(function).bind(*range(num_arguments), **dict.fromkeys(keywords, 0.0))
    except (TypeError, ValueError) as error:
        yield f"{what} cannot be called as the contract says: {error}"


def _range_problems(loss: Loss) -> Iterator[str]:
    if not callable(loss.function):
        return
    if not isinstance(loss.ranges, Mapping):
        yield f"loss {loss.name!r:.80} has ranges {loss.ranges!r:.80}, not a mapping"
        return
    for option, limits in loss.ranges.items():
        if option not in keyword_options(loss.function):
            yield f"loss {loss.name!r:.80} has a range of {option!r:.80}, which is no keyword-only argument of it"
        if not (isinstance(limits, tuple) and len(limits) == 2 and all(isinstance(x, int | float) for x in limits)):
            yield f"loss {loss.name!r:.80} has the range {limits!r:.80} of {option!r:.80}, not two numbers"
