"""Drafts the tokens that are likely to come next, so that one forward pass can confirm several.

A drafted token is kept exactly when it is the token that the chain samples at its place with that place's own noise, so
speculation changes how many passes are needed and, in reproducible mode, nothing else: at any temperature the tokens
are those without it. (The acceptance by likelihood ratio of Leviathan et al., 2211.17192, keeps the distribution only.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np
from treadle_plugin_api.backend import Batch

from treadle_server.engine.lane import Ids, Lane
from treadle_server.model.decoder import Decoder
from treadle_server.model.kv_cache import KVCache

# Longest and shortest run of tokens that prompt lookup searches for.
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2
# Tokens that a draft model reads of a sequence in one step: a long prompt must not hold up the others.
_MAX_CATCH_UP = 256


class Speculation(Enum):
    """Where drafted tokens come from."""

    NONE = auto()
    PROMPT_LOOKUP = auto()
    DRAFT_MODEL = auto()


class Drafter(Protocol):
    """Drafts tokens for decoding sequences."""

    def draft(self, lanes: Sequence[Lane], counts: Sequence[int]) -> None:
        """Draft at most counts[i] tokens on lanes[i]."""


class PromptLookup:
    """Drafts what followed the last time that the newest tokens stood together in the sequence.

    Source: Saxena, Prompt Lookup Decoding (2023). Costs no model; pays off where text repeats: code, summaries, quotes.
    """

    def draft(self, lanes: Sequence[Lane], counts: Sequence[int]) -> None:
        """Draft on each lane what followed the latest earlier place of its last tokens, longest match first."""
        for lane, count in zip(lanes, counts, strict=True):
            lane.draft(_continuation(lane.ids, count))


def _continuation(ids: Ids, count: int) -> Ids:
    """Return up to `count` tokens that followed the latest earlier place of the last tokens of `ids`."""
    for length in range(min(_LONGEST_MATCH, len(ids) - 1), _SHORTEST_MATCH - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], length)
        places = np.flatnonzero((windows == ids[-length:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + length
            return ids[start : start + count]
    return ids[:0]


class DraftModel:
    """Drafts greedily with a smaller model of the same vocabulary, all sequences in one batch."""

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size  # ids past it are padding, and never sampled

    def new_cache(self, max_tokens: int) -> KVCache:
        """Return an empty cache for the small model's keys and values of a sequence."""
        return self._decoder.new_cache(max_tokens=min(max_tokens, self._decoder.config.context_length))

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Return the memory of the small model's keys and values of so many tokens, in bytes."""
        return self._decoder.cache_bytes(num_tokens)

    def draft(self, lanes: Sequence[Lane], counts: Sequence[int]) -> None:
        """Let the small model read what it has not seen, and continue each lane it has caught up with."""
        drafts: list[list[int]] = [[] for _ in lanes]
        most = self._decoder.config.context_length
        live = [i for i, lane in enumerate(lanes) if 0 < counts[i] <= most - lane.num_tokens]
        unseen = {i: _unseen(lanes[i]) for i in live}
        while live:
            tops = self._read([lanes[i] for i in live], [unseen[i] for i in live])
            for i, top in zip(live, tops, strict=True):
                unseen[i] = np.array([top])
                if _length(lanes[i]) >= lanes[i].num_tokens + len(drafts[i]):
                    drafts[i].append(top)
            live = [i for i in live if 0 < len(drafts[i]) < counts[i]]
        for lane, draft in zip(lanes, drafts, strict=True):
            lane.draft(draft)

    def _read(self, lanes: Sequence[Lane], unseen: Sequence[Ids]) -> list[int]:
        """Feed each lane its tokens; return the most likely token after each."""
        caches = [lane.draft_cache for lane in lanes if lane.draft_cache is not None]
        batch = Batch.of(
            unseen, [cache.length for cache in caches], prompt_lengths=[len(lane.prompt_ids) for lane in lanes]
        )
        hidden = self._decoder.forward(batch, caches)
        logits = self._decoder.head(hidden[batch.starts[1:] - 1])
        return [int(top) for top in logits[:, : self._vocab_size].argmax(axis=1)]


def _length(lane: Lane) -> int:
    return 0 if lane.draft_cache is None else lane.draft_cache.length


def _unseen(lane: Lane) -> Ids:
    """Return the next tokens of a lane that the small model has not read, so many as it reads in one step."""
    start = _length(lane)
    return lane.ids[start : start + _MAX_CATCH_UP]
