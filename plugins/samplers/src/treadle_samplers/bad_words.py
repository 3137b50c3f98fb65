"""Words that never come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, ModelInfo, PrivateAttr, SamplingContext, Stage
from treadle_plugin_api.logits import Ids

from treadle_samplers.history import last_ids
from treadle_samplers.token_ids import TokenId, check_ids, require_token, without

_MOST_WORDS = 10_000
Word = Annotated[str, Field(min_length=1, max_length=1024)]
WordIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=1024)]


class BadWords(Stage):
    """Mask the token that would complete a banned word.

    Formula: for each word w_1 ... w_n in token ids, l of w_n = -inf where the last n - 1 tokens, prompt included, are
    w_1 ... w_{n-1} (as in transformers). Texts are tokenised as they stand, and once more with a space before them, as
    in vLLM, since a tokenizer has other tokens at the start of a word.

    Edges: a word of one token is masked always. The same letters in other tokens are not caught: to be sure of a text,
    use a stop string or a grammar. Empty words are refused; an empty list is off. Where other masks leave only tokens
    that complete a word, the request fails.
    """

    name = "bad_words"
    kind = "mask"
    api_version = 1

    bad_words: Annotated[tuple[Word, ...], Knob(off=((),))] = Field(
        default=(), max_length=_MOST_WORDS, description="texts that may not come"
    )
    bad_words_token_ids: Annotated[tuple[WordIds, ...], Knob(off=((),))] = Field(
        default=(), max_length=_MOST_WORDS, description="words that may not come, each as a list of token ids"
    )
    # By what comes before it, the last tokens of words; and the lengths of what comes before.
    _last_ids: dict[tuple[int, ...], Ids] = PrivateAttr(default_factory=dict)
    _lengths: tuple[int, ...] = PrivateAttr(default=())

    def check(self, model_info: ModelInfo) -> None:
        """Tokenise the words, and refuse ids outside the vocabulary."""
        for index, ids in enumerate(self.bad_words_token_ids):
            check_ids(f"bad_words_token_ids[{index}]", ids, model_info.vocab_size)
        endings: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in [*self.bad_words_token_ids, *self._tokenised(model_info)]:
            endings[tuple(word[:-1])].add(word[-1])
        self._last_ids = {before: np.array(sorted(ids), dtype=np.int64) for before, ids in endings.items()}
        self._lengths = tuple(sorted({len(before) for before in endings}))
        always = self._last_ids.get((), ())
        if len(always) >= model_info.vocab_size:
            raise ValueError(f"{self._field()} must leave a token; received all {len(always)} of the vocabulary")

    def _tokenised(self, model_info: ModelInfo) -> Iterator[Sequence[int]]:
        for index, text in enumerate(self.bad_words):
            words = [model_info.encode(text), model_info.encode(f" {text}")]
            if not words[0]:
                raise ValueError(f"bad_words[{index}] must have a token of the model's; received {text!r:.80}")
            yield from filter(None, words)

    def _field(self) -> str:
        return "bad_words" if self.bad_words else "bad_words_token_ids"

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without what would complete a word."""
        past = last_ids(context, self._lengths[-1] if self._lengths else 0)
        befores = [tuple(past[len(past) - length :]) for length in self._lengths if length <= len(past)]
        banned = [self._last_ids[before] for before in befores if before in self._last_ids]
        if not banned:
            return logits
        return require_token(without(logits, np.concatenate(banned), context), "every token left completes a bad word")
