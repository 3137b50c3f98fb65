"""Turns a prompt, in any of its three forms, into token ids that the model can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from treadle_server.errors import InvalidRequestError
from treadle_server.language_model.spec import Message, Prompt
from treadle_server.language_model.validation import refuse, token_id_violations
from treadle_server.tokenizer import ChatTemplate, Token, Tokenizer


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int, max_tokens: int) -> list[int]:
    """Return the ids of a prompt, at least one and at most `max_tokens`.

    A text is tokenised as the tokenizer does it for a whole text; ids are taken as they are; messages go through the
    chat template. An empty text or list becomes the beginning-of-sequence token.

    Raises:
        InvalidRequestError: the prompt is empty, too long, of a wrong type, or holds an id outside the vocabulary.
        ChatTemplateError: the template refuses the messages.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, max_tokens)
    elif _all_messages(prompt):
        template = _checked_template(cast("Sequence[Message]", prompt), tokenizer, max_tokens)
        ids = tokenizer.encode(template.render(cast("Sequence[Message]", prompt)), add_special_tokens=False)
    else:
        ids = list(cast("Sequence[int]", prompt))
        violations = list(token_id_violations("prompt", ids, vocab_size))
        if violations:
            raise InvalidRequestError(violations)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise refuse("prompt", "prompt_empty")
        ids = [tokenizer.bos_token_id]
    if len(ids) > max_tokens:
        raise refuse("prompt", "context", value=len(ids), limit=max_tokens)
    return ids


def _all_messages(prompt: object) -> bool:
    """Tell messages from token ids; refuse a mixture."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise refuse("prompt", "prompt_type", value=type(prompt).__name__)
    kinds = [isinstance(entry, Mapping) for entry in prompt]
    if any(kinds) and not all(kinds):
        index = kinds.index(not kinds[0])
        raise refuse("prompt", "prompt_mixed", index=index, value=prompt[index])
    return bool(kinds) and all(kinds)


def _encode_text(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    _check_text("prompt", text, tokenizer, max_tokens)
    return tokenizer.encode(text)


def tokenize(
    prompt: str | Sequence[Message], tokenizer: Tokenizer, *, add_special_tokens: bool, max_tokens: int
) -> list[Token]:
    """Return the tokens of a text with their places in it, or those of messages in their rendered text."""
    if isinstance(prompt, str):
        _check_text("text", prompt, tokenizer, max_tokens)
        return tokenizer.encode_with_offsets(prompt, add_special_tokens)
    template = _checked_template(prompt, tokenizer, max_tokens)
    return tokenizer.encode_with_offsets(template.render(prompt), False)


def _checked_template(messages: Sequence[Message], tokenizer: Tokenizer, max_tokens: int) -> ChatTemplate:
    """Return the model's chat template after a look at what it is to render."""
    for index, message in enumerate(messages):
        for part in ("role", "content"):
            if not isinstance(message.get(part), str):
                raise refuse(f"prompt[{index}]", "message", value=dict(message))
            _check_text(f"prompt[{index}].{part}", message[part], tokenizer, max_tokens)
    if tokenizer.chat_template is None:
        raise refuse("prompt", "no_template")
    return tokenizer.chat_template


def _check_text(field: str, text: str, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Refuse lone surrogates, which no tokenizer can encode, and megabytes before they are tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse(field, "utf8", value=error.reason) from None
    least = tokenizer.min_tokens_of(text)
    if least > max_tokens:
        raise refuse(field, "context_at_least", value=least, limit=max_tokens)
