"""Turns a choice's tokens into text as they come: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_server.language_model.spec import GenerationSpec
from treadle_server.tokenizer import Detokenizer, StopMatcher, Tokenizer


class ChoiceText:
    """The text of one choice.

    Attributes:
        num_tokens: tokens taken so far; those past a stop string are not taken.
        matched: the stop string that ended the text, once one has.
    """

    def __init__(self, tokenizer: Tokenizer, spec: GenerationSpec, prompt_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._spec = spec
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=not spec.special_tokens, prompt_ids=prompt_ids)
        self._stop = StopMatcher(spec.stop, include_stop=spec.include_stop)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._stop.matched

    def push(self, token_id: int, *, is_stop: bool) -> str:
        """Take one token; return the text that is certain now."""
        self.num_tokens += 1
        if is_stop:
            return self._stop_token_text(token_id)
        text = self._detokenizer.push([token_id])
        # Stop strings do not count before min_tokens: the text goes past the matcher.
        if self.num_tokens < self._spec.min_tokens:
            return text
        return self._stop.push(text)

    def _stop_token_text(self, token_id: int) -> str:
        """Close the text at a stop token, which is shown only when that was asked for."""
        text = self.flush()
        if self._spec.include_stop and self.matched is None:
            text += self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the choice."""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()
