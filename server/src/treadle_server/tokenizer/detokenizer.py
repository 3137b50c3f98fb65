"""Token ids to text, a few at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle_server.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's token ids into text as they come.

    For every split of a list of ids, the joined results of `push` and `flush` equal `Tokenizer.decode` of the list.
    Nothing that a later token could change is returned early: half a character, a space that clean-up may remove.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave out special tokens such as the end of sequence.
        prompt_ids: the ids that come before. The text is then what the new ids add to the prompt's: a word keeps the
            space in front of it that it would lose at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._chain = tokenizer.make_chain()
        self._unseen_prompt = self._read_prompt(list(prompt_ids))

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text that they settle, which may be empty."""
        return self._without_prompt(self._chain.push(self._tokens(ids)))

    def flush(self) -> str:
        """Return the rest; the sequence is over."""
        text = self._without_prompt(self._chain.flush())
        self._unseen_prompt = ""
        return text

    def _tokens(self, ids: Iterable[int]) -> list[str]:
        return self._tokenizer.tokens(ids, skip_special_tokens=self._skip_special_tokens)

    def _read_prompt(self, ids: list[int]) -> str:
        """Feed the prompt; return the end of its text that the chain still holds and will return with later text."""
        if not ids:
            return ""
        settled = self._chain.push(self._tokens(ids))
        return self._tokenizer.decode(ids, self._skip_special_tokens)[len(settled) :]

    def _without_prompt(self, text: str) -> str:
        """Drop the held end of the prompt off the front of `text`, up to where the new ids changed it."""
        if not (self._unseen_prompt and text):
            return text
        pairs = zip(text, self._unseen_prompt, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._unseen_prompt = self._unseen_prompt[same:] if same == len(text) else ""
        return text[same:]
