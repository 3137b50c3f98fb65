"""Turns a prompt, in any of its three forms, into token ids that the model can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from treadle_server.errors import InvalidRequestError
from treadle_server.language_model.spec import Message, Prompt
from treadle_server.language_model.validation import is_list, is_unicode, refuse, token_id_violations
from treadle_server.tokenizer import ChatTemplate, Token, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Encodes prompts for one model.

    Every form of prompt is refused by its size before anything is made of it: a request of megabytes costs little.

    Attributes:
        vocab_size: ids must be below it.
        context_length: the model's, for messages.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_length: int

    def encode(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """Return the ids of a prompt, at least one and at most `max_tokens`.

        A text is tokenised as the tokenizer does it for a whole text; ids are taken as they are; messages go through
        the chat template. An empty text or list becomes the beginning-of-sequence token.

        Raises:
            InvalidRequestError: the prompt is empty, too long, of a wrong type, or holds an id outside the vocabulary.
            ChatTemplateError: the template refuses the messages.
        """
        if isinstance(prompt, str):
            self._check_text("prompt", prompt, max_tokens)
            ids = self.tokenizer.encode(prompt)
        else:
            ids = self._encode_list(prompt, max_tokens)
        if not ids:
            if self.tokenizer.bos_token_id is None:
                raise refuse("prompt", "prompt_empty")
            ids = [self.tokenizer.bos_token_id]
        self._check_count(len(ids), max_tokens)
        return ids

    def tokenize(self, prompt: str | Sequence[Message], *, add_special_tokens: bool, max_tokens: int) -> list[Token]:
        """Return the tokens of a text with their places in it, or those of messages in their rendered text."""
        if isinstance(prompt, str):
            self._check_text("text", prompt, max_tokens)
            return self.tokenizer.encode_with_offsets(prompt, add_special_tokens)
        if not is_list(prompt) or not all(isinstance(entry, Mapping) for entry in prompt):
            raise refuse("prompt", "text_or_messages", value=prompt)
        return self.tokenizer.encode_with_offsets(self._render(prompt, max_tokens), False)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool, max_tokens: int) -> str:
        """Return the text of token ids, `max_tokens` at most.

        Raises:
            InvalidRequestError: an id is outside the vocabulary, or there are too many.
        """
        if len(token_ids) > max_tokens:
            raise refuse("token_ids", "too_many", limit=max_tokens, value=len(token_ids))
        violations = list(token_id_violations("token_ids", token_ids, self.vocab_size))
        if violations:
            raise InvalidRequestError(violations)
        return self.tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)

    def _encode_list(self, prompt: Sequence[int] | Sequence[Message], max_tokens: int) -> list[int]:
        if not is_list(prompt):
            raise refuse("prompt", "prompt_type", value=prompt)
        self._check_count(len(prompt), max_tokens)
        kinds = [isinstance(entry, Mapping) for entry in prompt]
        if any(kinds) and not all(kinds):
            index = kinds.index(not kinds[0])
            raise refuse("prompt", "prompt_mixed", index=index, value=prompt[index])
        if any(kinds):
            messages = cast("Sequence[Message]", prompt)
            return self.tokenizer.encode(self._render(messages, max_tokens), add_special_tokens=False)
        ids = cast("Sequence[int]", prompt)
        violations = list(token_id_violations("prompt", ids, self.vocab_size))
        if violations:
            raise InvalidRequestError(violations)
        return list(ids)

    def _render(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Return the text of messages, unless a look at its length tells that it is too long."""
        rendered = self._template(messages, max_tokens).render(messages)
        self._check_text("prompt", rendered, max_tokens)
        return rendered

    def _template(self, messages: Sequence[Message], max_tokens: int) -> ChatTemplate:
        """Return the model's chat template after a look at what it is to render."""
        for index, message in enumerate(messages):
            for part in ("role", "content"):
                if not isinstance(message.get(part), str):
                    raise refuse(f"prompt[{index}]", "message", value=dict(message))
                self._check_text(f"prompt[{index}].{part}", message[part], max_tokens)
        if self.tokenizer.chat_template is None:
            raise refuse("prompt", "no_template")
        return self.tokenizer.chat_template

    def _check_text(self, field: str, text: str, max_tokens: int) -> None:
        """Refuse lone surrogates, which no tokenizer can encode, and megabytes before they are tokenised."""
        if not is_unicode(text):
            raise refuse(field, "utf8", value="it holds a lone surrogate")
        least = self.tokenizer.min_tokens_of(text)
        if least > max_tokens:
            raise refuse(field, "context_at_least", value=least, room=max_tokens)

    def _check_count(self, count: int, max_tokens: int) -> None:
        if count > max_tokens:
            raise refuse("prompt", "context", value=count, room=max_tokens, limit=self.context_length)
