"""Messages to the text a chat model was trained on, by the Jinja template in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from treadle_server.errors import InvalidRequestError, Violation

if TYPE_CHECKING:
    from treadle_server.tokenizer.limits import Limits
    from treadle_server.tokenizer.rendering import BoundedTemplate


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
        self._limits = limits

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
        return self._template.render(variables)

    @cached_property
    def _template(self) -> BoundedTemplate:
        from treadle_server.tokenizer.rendering import BoundedTemplate  # Jinja is slow to import, and not always needed

        return BoundedTemplate(self.source, self._limits)


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
