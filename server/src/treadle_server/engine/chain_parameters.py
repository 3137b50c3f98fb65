"""From the parameters of a request to a stage, or to messages that name field, range and value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from treadle_plugin_api import Select, Stage

from treadle_server.errors import Violation
from treadle_server.plugins.registry import StageClass

_LONGEST_VALUE = 80
_MOST_PROBLEMS = 16  # a long list can be wrong everywhere
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which neither JSON nor a message can carry
_TYPES: Mapping[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}

Location = tuple[int | str, ...]


class ParameterError(Exception):
    """Parameters that a stage refuses: a message for each, with its location."""

    def __init__(self, problems: list[tuple[Location, str]]) -> None:
        self.problems = problems
        super().__init__(str(problems))

    def violations(self, prefix: str) -> list[Violation]:
        """One violation a problem; its path is `prefix` and the location."""
        return [Violation(_path(prefix, location), message) for location, message in self.problems]


def build_stage(cls: StageClass, parameters: Mapping[str, object]) -> Stage | Select:
    """A stage of class `cls`; raises ParameterError with every problem.

    The values are read as pydantic reads JSON, strictly, so that 3, 3.0 and true stay apart however they came in.
    """
    problems = [
        (location, _message(cls, location, found, f"{_shown(found)} is no plain value"))
        for location, found in islice(_not_plain(parameters, ()), _MOST_PROBLEMS)
    ]
    if problems:
        raise ParameterError(problems)
    try:
        return cls.model_validate_json(json.dumps(parameters), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[:_MOST_PROBLEMS]
        raise ParameterError([(one["loc"], _of_pydantic(cls, parameters, one)) for one in found]) from None


def range_text(field: FieldInfo) -> str:
    """What a field takes, in words, such as "a number above 0 and at most 1"; empty for anything but a plain scalar."""
    if field.annotation not in _TYPES:
        return ""
    bounds = [
        f"{words} {getattr(limit, attribute):g}"
        if field.annotation is float
        else f"{words} {getattr(limit, attribute)}"
        for attribute, words in _BOUNDS.items()
        for limit in field.metadata
        if getattr(limit, attribute, None) is not None
    ]
    return " ".join([_TYPES[field.annotation], " and ".join(bounds)]).strip()


def _not_plain(value: object, location: Location) -> Iterator[tuple[Location, object]]:
    """Every value that our own message types could not carry: NaN, infinities, huge integers, objects."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, bool) or not isinstance(key, int | str):
                yield (*location, str(key)), key
            yield from _not_plain(inner, (*location, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_plain(inner, (*location, index))
    elif not _is_plain(value):
        yield location, value


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return value.bit_length() <= 64  # int64 and the unsigned seeds; Python would refuse to print far larger ones
    return value is None or (isinstance(value, str) and not _SURROGATE.search(value))


def _of_pydantic(cls: StageClass, parameters: Mapping[str, object], error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        known = ", ".join(cls.model_fields) or "none"
        return f"is not a parameter of stage {cls.name!r}; its parameters: {known}"
    if error["type"] == "missing":
        return f"is required by stage {cls.name!r}"
    if error["type"] == "value_error":  # a validator of the stage's own: its words say more than ours
        return f"{error['msg'].removeprefix('Value error, ')}; received {_shown(error['input'])}"
    received = parameters.get(str(error["loc"][0])) if len(error["loc"]) == 1 else error.get("input")
    return _message(cls, error["loc"], received, f"{error['msg']}; received {_shown(received)}")


def _message(cls: StageClass, location: Location, received: object, otherwise: str) -> str:
    field = cls.model_fields.get(str(location[0])) if len(location) == 1 else None
    expected = range_text(field) if field is not None else ""
    return f"must be {expected}; received {_shown(received)}" if expected else otherwise


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = f"{value} (numpy.{type(value).__name__})" if type(value).__module__ == "numpy" else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _path(prefix: str, location: Location) -> str:
    for part in location:
        prefix += f"[{part}]" if isinstance(part, int) else f".{part}" if prefix else part
    return prefix
