"""Runs a Jinja template within its limits, and says in one line why it failed."""

from __future__ import annotations

from functools import cached_property
from types import CodeType, TracebackType

from jinja2 import Template, TemplateSyntaxError

from treadle_server.errors import ChatTemplateError
from treadle_server.tokenizer.limits import Budget, LimitError, Limits
from treadle_server.tokenizer.sandbox import BoundedEnvironment

_MAX_SOURCE_LENGTH = 64 * 1024  # the longest known ones have about 20,000 characters


class BoundedTemplate:
    """A template and how far it may go; it is compiled once."""

    def __init__(self, source: str, limits: Limits | None) -> None:
        self._source = source
        self._limits = limits or Limits()

    def render(self, variables: dict[str, object]) -> str:
        """Return the template's text; raises ChatTemplateError with the line where it is broken or failed."""
        # Raised after the handler is left: an exception that kept the traceback would keep all the template's values.
        try:
            return self._run(variables)
        except TemplateSyntaxError as error:
            failure = f", line {error.lineno}: {error.message}"
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            failure = f"{_line_of(error.__traceback__)}: {_reason(error)}"
        raise ChatTemplateError(f"chat template{failure}")

    @cached_property
    def _code(self) -> CodeType:
        if len(self._source) > _MAX_SOURCE_LENGTH:
            raise LimitError(f"expected at most {_MAX_SOURCE_LENGTH} characters of source, got {len(self._source)}")
        return BoundedEnvironment(Budget(self._limits)).compile(self._source)

    def _run(self, variables: dict[str, object]) -> str:
        budget = Budget(self._limits)
        environment = BoundedEnvironment(budget)
        template = Template.from_code(environment, self._code, environment.globals)
        pieces, length = [], 0
        for piece in template.root_render_func(template.new_context(variables)):
            length += len(piece)
            budget.output(length)
            pieces.append(piece)
        return "".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    return str(error) or type(error).__name__


def _line_of(traceback: TracebackType | None) -> str:
    """Return the template's line in which an error was raised, as text for its message."""
    line = ""
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = f", line {template.get_corresponding_lineno(traceback.tb_lineno)}"
        traceback = traceback.tb_next
    return line
