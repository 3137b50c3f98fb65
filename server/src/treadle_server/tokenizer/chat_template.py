"""Messages to the text a chat model was trained on, by the Jinja template in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import CodeType, TracebackType

from jinja2 import Template, TemplateSyntaxError

from treadle_server.errors import ChatTemplateError, InvalidRequestError, Violation
from treadle_server.tokenizer.limits import Budget, LimitError, Limits
from treadle_server.tokenizer.sandbox import BoundedEnvironment

_MAX_SOURCE_LENGTH = 64 * 1024  # the longest known ones have about 20,000 characters


class ChatTemplate:
    """A chat template, run in a sandbox with bounded time, memory and output.

    Args:
        source: the Jinja source.
        variables: what the template sees beside the messages: the special tokens by name.
        limits: how far a template may go.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, limits: Limits | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._limits = limits or Limits()

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation; with `add_generation_prompt` up to where the model's answer starts.

        Raises:
            ChatTemplateError: the template is broken, raised, or ran past a limit; with the line it happened in.
            InvalidRequestError: a message is not a role and a content.
        """
        check_messages(messages)
        variables: dict[str, object] = {
            **self._variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
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
        if len(self.source) > _MAX_SOURCE_LENGTH:
            raise LimitError(f"expected at most {_MAX_SOURCE_LENGTH} characters of source, got {len(self.source)}")
        return BoundedEnvironment(Budget(self._limits)).compile(self.source)

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


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise `InvalidRequestError` unless there are messages and each has a role and a content, both strings."""
    if not messages:
        raise InvalidRequestError.of("messages", "expected at least one message, got none")
    violations = [
        Violation(f"messages[{index}].{field}", f"expected a string, got {type(value).__name__}")
        for index, message in enumerate(messages)
        for field in ("role", "content")
        if not isinstance(value := message.get(field) if isinstance(message, Mapping) else None, str)
    ]
    if violations:
        raise InvalidRequestError(violations)


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
