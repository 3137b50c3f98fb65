"""Turns keyword arguments, such as a script writes them, into a GenerationSpec."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from treadle_server.engine.chain import StageSpec
from treadle_server.engine.request import LogprobsMode
from treadle_server.language_model.spec import GenerationSpec, Prompt

_FIELDS = frozenset(field.name for field in dataclasses.fields(GenerationSpec)) - {"prompt", "knobs"}


def spec_of(prompt: Prompt, knob_names: Iterable[str], keywords: Mapping[str, Any]) -> GenerationSpec:
    """Make a spec from keyword arguments: fields of GenerationSpec, and plain sampling knobs by their names.

    `stop` may be one text, `logprobs` one of "raw" and "processed", and a stage a name or a (name, parameters) pair.

    Raises:
        TypeError: a keyword is unknown; the message names the nearest known one.
    """
    known = _FIELDS | set(knob_names)
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown keyword {name!r}{hint}")
    fields = {name: value for name, value in keywords.items() if name in _FIELDS}
    # None is unset, as it is for every field.
    knobs = {name: value for name, value in keywords.items() if name not in _FIELDS and value is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if "stages" in fields:
        fields["stages"] = tuple(_stage(stage) for stage in fields["stages"])
    if "logprobs" in fields:
        fields["logprobs"] = _logprobs(fields["logprobs"])
    return GenerationSpec(prompt=prompt, knobs=knobs, **fields)


def _stage(stage: str | tuple[str, Mapping[str, Any]] | StageSpec) -> StageSpec:
    if isinstance(stage, StageSpec):
        return stage
    if isinstance(stage, str):
        return StageSpec(stage, {})
    name, parameters = stage
    return StageSpec(name, dict(parameters))


def _logprobs(value: str | LogprobsMode | None) -> LogprobsMode:
    if isinstance(value, LogprobsMode):
        return value
    modes = {None: LogprobsMode.NONE, "raw": LogprobsMode.RAW, "processed": LogprobsMode.PROCESSED}
    if value not in modes:
        raise TypeError(f'logprobs must be None, "raw" or "processed", got {value!r}')
    return modes[value]
