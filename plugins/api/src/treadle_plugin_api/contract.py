"""The rules of the sampler contract as checks: the engine guards foreign stages by them, and `testing` tests."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from treadle_plugin_api.logits import Logits
from treadle_plugin_api.sampling import Kind, Select, Stage

SUPPORTED_API_VERSIONS = (1,)
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}")

_CLASS_ATTRIBUTES = ("name", "kind", "api_version", "argmax_invariant")
_REQUIRED_CONFIG = {"frozen": True, "strict": True, "extra": "forbid", "allow_inf_nan": False}


def output_problem(before: Logits, after: object) -> str | None:
    """What is wrong with a stage's result `after`, given its input `before` [vocab] float32; None if nothing is."""
    if type(after) is not np.ndarray:
        return f"returned {type(after).__name__}, not a NumPy array"
    if after.shape != before.shape or after.dtype != np.float32:
        return f"returned {after.dtype} {list(after.shape)}, not float32 {list(before.shape)}"
    if (problem := largest_problem(after)) is not None:
        return problem
    reopened = (before == -np.inf) & (after > -np.inf)
    if reopened.any():
        return f"made the masked token {int(reopened.argmax())} possible again"
    return None


def largest_problem(logits: Logits) -> str | None:
    """What the largest of `logits` [vocab] float32 gives away: a NaN, +inf, or that every token is masked."""
    largest = logits.max()  # NaN wins every comparison in NumPy's max
    if np.isfinite(largest):
        return None
    if largest == -np.inf:
        return "left no token that could be chosen"
    return f"returned {'NaN' if np.isnan(largest) else '+inf'} for token {int(logits.argmax())}"


def choice_problem(logits: Logits, token_id: object) -> str | None:
    """What is wrong with a select's answer `token_id` for `logits` [vocab] float32; None if nothing is."""
    if isinstance(token_id, bool | np.bool_) or not isinstance(token_id, int | np.integer):
        return f"returned {token_id!r:.80}, not a token id"
    if not 0 <= token_id < len(logits):
        return f"chose {token_id}, outside the vocabulary of {len(logits)} tokens"
    if not logits[token_id] > -np.inf:
        return f"chose the masked token {token_id}"
    return None


def class_problems(cls: object) -> list[str]:
    """Every reason why `cls` cannot be registered as a stage; empty if there is none."""
    if not (isinstance(cls, type) and issubclass(cls, Stage | Select)) or cls in (Stage, Select):
        return [f"{cls!r:.80} is not a subclass of Stage or Select"]
    problems = [*_attribute_problems(cls), *_field_problems(cls), *_method_problems(cls)]
    return problems or list(_schema_problems(cls))


def has_override(cls: type[Stage | Select], method: str) -> bool:
    """Whether a stage class replaces an optional method of its base."""
    owner = next(base for base in cls.__mro__ if method in vars(base))
    return owner.__module__ != Stage.__module__


def _attribute_problems(cls: type[Stage | Select]) -> Iterator[str]:
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and NAME_PATTERN.fullmatch(name)):
        yield f"name is {name!r:.80}, not lower-case letters, digits and underscores"
    kinds = ("select",) if issubclass(cls, Select) else get_args(Kind)[:-1]
    if getattr(cls, "kind", None) not in kinds:
        yield f"kind is {getattr(cls, 'kind', None)!r:.80}, not one of {', '.join(kinds)}"
    if type(cls.api_version) is not int or cls.api_version not in SUPPORTED_API_VERSIONS:
        known = ", ".join(str(version) for version in SUPPORTED_API_VERSIONS)
        yield f"api_version is {cls.api_version!r:.80}; this treadle runs {known}"
    if type(cls.argmax_invariant) is not bool:
        yield f"argmax_invariant is {cls.argmax_invariant!r:.80}, not True or False"


def _field_problems(cls: type[Stage | Select]) -> Iterator[str]:
    for field in cls.model_fields:
        if field in _CLASS_ATTRIBUTES:
            yield f"{field} is a field; write it without a type, as `{field} = ...`"
        elif hasattr(Stage, field) or hasattr(Select, field) or hasattr(BaseModel, field):
            yield f"the field {field!r} hides a method of the base; call it otherwise"
    for key, value in _REQUIRED_CONFIG.items():
        if cls.model_config.get(key) != value:
            yield f"model_config changes {key}, which must stay {value!r}"


def _method_problems(cls: type[Stage | Select]) -> Iterator[str]:
    if inspect.isabstract(cls):
        yield "it defines no apply(self, logits, context, state=None)"
        return
    # Called as the engine calls them: a missing parameter is found here, not at the first token.
    for method, num_arguments in {"apply": 4, "check": 2, "start": 2, "accept": 3, "clone": 2}.items():
        function = inspect.getattr_static(cls, method)
        if not callable(function):
            continue  # a static or class method: bound differently, the call itself will tell
        try:
            inspect.signature(function).bind(*range(num_arguments))
        except TypeError as error:
            yield f"{method} cannot be called as the contract says: {error}"


def _schema_problems(cls: type[Stage | Select]) -> Iterator[str]:
    try:
        json.dumps(cls.model_json_schema(), allow_nan=False)
        if not any(field.is_required() for field in cls.model_fields.values()):
            cls()
    except Exception as error:  # noqa: BLE001 - author's validators and types may raise anything; the reason is reported
        yield f"its parameters are not usable: {type(error).__name__}: {error}"


def default_parameters(cls: type[Stage | Select]) -> dict[str, Any]:
    """The default of every parameter that has one."""
    return {name: field.get_default() for name, field in cls.model_fields.items() if not field.is_required()}
