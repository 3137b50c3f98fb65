"""Turns keyword arguments, such as a script writes them, into a spec."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.request import LogprobsMode
from treadle_server.engine.speculation import Speculation
from treadle_server.language_model.spec import GenerationSpec, PreviewSpec, Prompt

_EnumT = TypeVar("_EnumT", bound=Enum)


def spec_of(prompt: Prompt, knob_names: Iterable[str], keywords: Mapping[str, Any]) -> GenerationSpec:
    """Make a spec from keyword arguments: fields of GenerationSpec, and plain sampling knobs by their names.

    `stop` may be one text, `logprobs` one of "raw" and "processed", and a stage a name or a (name, parameters) pair.

    Raises:
        TypeError: a keyword is unknown; the message names the nearest known one.
    """
    fields = _fields(GenerationSpec, knob_names, keywords)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    fields = {name: value for name, value in fields.items() if value is not None}
    if "logprobs" in fields:
        fields["logprobs"] = _named("logprobs", LogprobsMode, fields["logprobs"])
    if "speculation" in fields:
        fields["speculation"] = _named("speculation", Speculation, fields["speculation"])
    return GenerationSpec(prompt=prompt, **fields)


def preview_spec_of(prompt: Prompt | None, knob_names: Iterable[str], keywords: Mapping[str, Any]) -> PreviewSpec:
    """Make a spec of a preview from keyword arguments, as `spec_of` does it."""
    return PreviewSpec(prompt=prompt, **_fields(PreviewSpec, knob_names, keywords))


def _fields(cls: type[Any], knob_names: Iterable[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments by field of a spec's class, the knobs among them under `knobs`."""
    names = {field.name for field in dataclasses.fields(cls)} - {"prompt", "knobs"}
    known = names | set(knob_names)
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown keyword {name!r}{hint}")
    fields = {name: value for name, value in keywords.items() if name in names}
    if "stages" in fields:
        fields["stages"] = _stages(fields["stages"])
    # None is unset, as it is for every field.
    fields["knobs"] = {name: value for name, value in keywords.items() if name not in names and value is not None}
    return fields


def _stages(stages: Any) -> Any:
    """Return stages as specs; anything but a list of them is left for the check of the spec to refuse."""
    return tuple(_stage(stage) for stage in stages) if isinstance(stages, list | tuple) else stages


def _stage(stage: str | tuple[str, Mapping[str, Any]] | StageSpec) -> StageSpec:
    if isinstance(stage, StageSpec):
        return stage
    if isinstance(stage, str):
        return StageSpec(stage, {})
    if not isinstance(stage, tuple | list) or len(stage) != 2 or not isinstance(stage[1], Mapping):
        raise TypeError(f"a stage must be a name, a (name, parameters) pair or a StageSpec, got {stage!r:.200}")
    return StageSpec(stage[0], dict(stage[1]))


def _named(keyword: str, kind: type[_EnumT], value: str | _EnumT) -> _EnumT:
    """Return the member of an enum that a text names in lower case."""
    names = {member.name.lower(): member for member in kind}
    if isinstance(value, kind):
        return value
    if not isinstance(value, str) or value not in names:
        raise TypeError(f"{keyword} must be one of {', '.join(map(repr, names))}, got {value!r:.200}")
    return names[value]
