"""DRY: don't repeat yourself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, ModelInfo, SamplingContext, Stage
from treadle_plugin_api.logits import Ids

from treadle_samplers.history import SuffixMatches
from treadle_samplers.token_ids import TokenId, check_ids

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_LOG = 88.7  # e to this is about float32's largest number
_MOST_BREAKERS = 1024
Breaker = Annotated[str, Field(min_length=1, max_length=1024)]


class Dry(Stage):
    """Make a token less likely the longer the passage is that it would repeat.

    Formula: where the last m tokens occurred before and x came after them, m the longest such length, and m is at least
    n: l of x -= multiplier * base^(m - n) (p-e-w: text-generation-webui #5677, 2024; as in llama.cpp). The exponent
    stops at 88.7 / ln base. The whole prompt and output count.

    Edges: a match never reaches over a sequence breaker, and a breaker is never penalised, so that the form of a text
    (names, quotes, line ends) can repeat. A token is a breaker if it is listed by id or if its bytes hold a listed
    text; a text may also span several tokens, all of which then end a match. Without a list of texts they are the usual
    four: newline, colon, quote, asterisk. A masked token stays masked, and no penalty makes one.
    """

    name = "dry"
    kind = "penalty"
    api_version = 1

    dry_multiplier: Annotated[float, Knob(off=(0.0,))] = Field(
        default=0.8, gt=0, le=1000, description="penalty of the shortest passage that counts"
    )
    dry_base: Annotated[float, Knob()] = Field(
        default=1.75, ge=1, le=100, description="factor on the penalty for each token more"
    )
    dry_allowed_length: Annotated[int, Knob()] = Field(
        default=2, ge=1, le=2**31 - 1, description="n, length of the shortest repeated passage that counts"
    )
    dry_sequence_breakers: Annotated[tuple[Breaker, ...], Knob()] = Field(
        default=("\n", ":", '"', "*"), max_length=_MOST_BREAKERS, description="texts that no passage reaches over"
    )
    dry_sequence_breaker_ids: Annotated[tuple[TokenId, ...], Knob()] = Field(
        default=(), description="tokens that no passage reaches over, beside the texts"
    )

    def check(self, model_info: ModelInfo) -> None:
        """Refuse ids outside the vocabulary."""
        check_ids("dry_sequence_breaker_ids", self.dry_sequence_breaker_ids, model_info.vocab_size)

    def start(self, context: SamplingContext) -> SuffixMatches:
        """Matches in the history so far."""
        return SuffixMatches.of(context)

    def accept(self, state: SuffixMatches, token_id: int) -> None:
        """One token more."""
        state.append(token_id)

    def clone(self, state: SuffixMatches) -> SuffixMatches:
        """A history of its own."""
        return state.copy()

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The penalised logits."""
        places = np.flatnonzero(state.lengths >= self.dry_allowed_length)
        if not len(places):
            return logits
        lengths = np.minimum(state.lengths[places], self._unbroken(state.ids, int(state.lengths.max()), context))
        longest = np.zeros(len(logits), dtype=np.int64)  # by token that would follow
        np.maximum.at(longest, state.ids[places + 1], lengths)
        repeating = np.flatnonzero((longest >= self.dry_allowed_length) & (logits > -np.inf))
        ids = np.array([one for one in repeating.tolist() if not self._breaks(one, context)], dtype=np.int64)
        exponents = np.minimum(longest[ids] - self.dry_allowed_length, self._largest_exponent())
        out = context.empty()
        np.copyto(out, logits)
        out[ids] = np.maximum(logits[ids] - self.dry_multiplier * self.dry_base**exponents, -_LARGEST)
        return out

    def _largest_exponent(self) -> float:
        return _LARGEST_LOG / math.log(self.dry_base) if self.dry_base > 1 else 0.0

    def _breaks(self, token_id: int, context: SamplingContext) -> bool:
        text = context.token_bytes(token_id)
        return token_id in self.dry_sequence_breaker_ids or any(one in text for one in self._texts())

    def _texts(self) -> Sequence[bytes]:
        return [text.encode() for text in self.dry_sequence_breakers]

    def _unbroken(self, ids: Ids, longest: int, context: SamplingContext) -> int:
        """How many of the last `longest` tokens come after every breaker."""
        longest = min(longest, self.dry_allowed_length + math.ceil(self._largest_exponent()))
        listed = np.flatnonzero(np.isin(ids[-longest:], self.dry_sequence_breaker_ids))
        after = longest - 1 - int(listed[-1]) if len(listed) else longest
        texts = self._texts()
        pieces = _pieces(ids, after, max(map(len, texts), default=0), context) if after else []
        joined = b"".join(pieces)
        end = max((place + len(text) for text in texts if (place := joined.rfind(text)) >= 0), default=0)
        ends = np.cumsum([0, *map(len, pieces)])
        return min(after, len(pieces) - int(np.searchsorted(ends[:-1], end)))


def _pieces(ids: Ids, count: int, num_bytes: int, context: SamplingContext) -> list[bytes]:
    """The bytes of the last `count` tokens, and before them of as many as hold `num_bytes`: a text can begin there."""
    pieces = [context.token_bytes(token_id) for token_id in ids[-count:].tolist()]
    before: list[bytes] = []
    for token_id in ids[-count - 1 :: -1].tolist() if len(ids) > count else ():
        if num_bytes <= 0:
            break
        before.append(context.token_bytes(token_id))
        num_bytes -= len(before[-1])
    return before[::-1] + pieces
