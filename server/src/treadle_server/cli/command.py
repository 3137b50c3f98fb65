"""Prepares the functions behind the commands: groups of options become dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose errors about an option tell the value that was given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, as every command does."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            errors = getattr(error.__cause__, "errors", None)  # pydantic's, which knows the value
            if errors is not None:
                error.message = f"{error.message.removesuffix('.')}, got {errors()[0]['input']!r:.200}"
            raise


def prepare(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for typer.

    A parameter whose type is a dataclass becomes one option for each field; the command gets them as one object.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{f.name: arguments.pop(f.name) for f in dataclasses.fields(group)})
        command(**arguments)

    own = [p.replace(annotation=hints[p.name]) for p in _parameters(command) if p.name not in groups]
    fields = [parameter for group in groups.values() for parameter in _field_parameters(group)]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *fields)]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


def _parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(command).parameters.values())


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(group)
    ]
