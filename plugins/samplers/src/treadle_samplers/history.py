"""The tokens so far, prompt and output, as stages look back at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from treadle_plugin_api import SamplingContext
from treadle_plugin_api.logits import Ids


def last_ids(context: SamplingContext, num_tokens: int) -> list[int]:
    """The last `num_tokens` ids of prompt and output, oldest first; all if there are fewer."""
    outputs = context.output_ids[max(context.num_outputs - num_tokens, 0) :]
    num_more = min(num_tokens - len(outputs), len(context.prompt_ids))
    return [*context.prompt_ids[len(context.prompt_ids) - num_more :].tolist(), *outputs.tolist()]


class SuffixMatches:
    """How far the end of the history repeats each place before it, kept up to date token by token.

    Place i matches with length m if the m tokens up to and with i are the last m tokens. A new token x lengthens the
    match of place i - 1 to place i where token i is x, and ends all others: one pass over the history a token, however
    repetitive it is.
    """

    def __init__(self, history: Sequence[int] | Ids) -> None:
        self._num_tokens = len(history)
        self._ids = np.array(history, dtype=np.int64)
        self._lengths = np.array(_suffix_lengths(self._ids.tolist()), dtype=np.int64)

    @classmethod
    def of(cls, context: SamplingContext) -> Self:
        """The matches in prompt and output."""
        return cls(np.concatenate([context.prompt_ids, context.output_ids]))

    @property
    def ids(self) -> Ids:
        """Every token: [tokens] int64."""
        return self._ids[: self._num_tokens]

    @property
    def lengths(self) -> Ids:
        """Length of the match of every place but the last: [tokens - 1] int64."""
        return self._lengths[: max(self._num_tokens - 1, 0)]

    def followers(self, length: int) -> Ids:
        """Tokens that came after a place whose match is at least `length`, with repeats: [places] int64."""
        return self.ids[1:][self.lengths >= length]

    def append(self, token_id: int) -> None:
        """Take in the next token."""
        count = self._num_tokens
        if count == len(self._ids):
            self._grow()
        same = self._ids[:count] == token_id
        self._lengths[1:count] = self._lengths[: max(count - 1, 0)] + 1
        self._lengths[:1] = 1
        self._lengths[:count] *= same
        self._ids[count] = token_id
        self._num_tokens += 1

    def copy(self) -> SuffixMatches:
        """A copy that goes on by itself."""
        other = SuffixMatches(())
        other._num_tokens, other._ids, other._lengths = self._num_tokens, self._ids.copy(), self._lengths.copy()
        return other

    def _grow(self) -> None:
        spare = np.empty(max(64, self._num_tokens), dtype=np.int64)
        self._ids = np.concatenate([self._ids, spare])
        self._lengths = np.concatenate([self._lengths, spare])


def _suffix_lengths(ids: list[int]) -> list[int]:
    """Length of the match of every place, by the Z-algorithm on the reversed tokens: linear, however repetitive."""
    text = ids[::-1]
    size = len(text)
    lengths = [0] * size
    left = right = 0  # the match that reaches furthest: text[left:right] == text[: right - left]
    for place in range(1, size):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < size and text[length] == text[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        lengths[place] = length
    return lengths[::-1]
