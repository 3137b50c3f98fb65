"""A run of tokens and what the model has seen of it: the part of a sequence that a forward pass works on."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from treadle_server.model.kv_cache import KVCache

Ids = npt.NDArray[np.int64]


class Lane:
    """Tokens with their keys and values, and tokens drafted after them that may turn out wrong.

    Attributes:
        prompt_ids: int64 [prompt], the tokens that were there from the start.
        cache: keys and values of the tokens that the model has seen.
        num_tokens: tokens that stand, prompt and output; drafted ones are not among them.
        draft_cache: keys and values of a draft model, where one is used, which drafts `draft_room` tokens at most.
    """

    def __init__(self, prompt_ids: Ids, cache: KVCache) -> None:
        self.prompt_ids = prompt_ids
        self.cache = cache
        self.num_tokens = len(prompt_ids)
        self.num_drafted = 0
        self.draft_cache: KVCache | None = None
        self.draft_room = 0
        self._draft_start = 0
        self._buffer = np.concatenate([prompt_ids, np.zeros(16, np.int64)])

    @property
    def num_computed(self) -> int:
        """How many tokens have keys and values in the cache."""
        return self.cache.length

    @property
    def num_remaining(self) -> int:
        """How many tokens the model must still see before it can tell the next one; drafted ones are not counted."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return self.num_tokens - len(self.prompt_ids)

    @property
    def ids(self) -> Ids:
        """The tokens that stand, int64 [num_tokens]."""
        return self._buffer[: self.num_tokens]

    def next_ids(self, count: int) -> Ids:
        """Return the next `count` tokens that the model has not seen, drafted ones included, int64 [count]."""
        return self._buffer[self.num_computed : self.num_computed + count]

    def append(self, token_id: int) -> None:
        """Add a token; it takes the place of the one drafted there."""
        self._make_room(1)
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def draft(self, ids: Seq[int] | Ids) -> None:
        """Write tokens that are likely to come next behind those that stand."""
        self._make_room(len(ids))
        self._buffer[self.num_tokens : self.num_tokens + len(ids)] = ids
        self._draft_start, self.num_drafted = self.num_tokens, len(ids)

    def drafted_next(self) -> int | None:
        """Return the token drafted for the next place, while there is one."""
        if self.num_tokens < self._draft_start + self.num_drafted:
            return int(self._buffer[self.num_tokens])
        return None

    def settle_draft(self) -> None:
        """Forget what was drafted and did not come; keys and values of what did come stay."""
        self.num_drafted = 0
        for cache in (self.cache, self.draft_cache):
            if cache is not None:
                cache.truncate(min(cache.length, self.num_tokens - 1))

    def release(self) -> None:
        """Give the memory of all keys and values back; the tokens stay."""
        self.num_drafted = 0
        self.cache.release()
        if self.draft_cache is not None:
            self.draft_cache.release()

    @property
    def kv_bytes(self) -> int:
        """Memory of keys and values held, in bytes."""
        return self.cache.num_bytes + (0 if self.draft_cache is None else self.draft_cache.num_bytes)

    def kv_bytes_after(self, num_new: int) -> int:
        """Memory of keys and values held once `num_new` further tokens are computed and drafted on, in bytes."""
        return self.cache.bytes_after(num_new) + self.draft_bytes_after(num_new)

    def draft_bytes_after(self, num_new: int) -> int:
        """Memory of the draft model's part of that, in bytes."""
        if self.draft_cache is None:
            return 0
        drafted_on = min(self.num_tokens + num_new + self.draft_room, self.draft_cache.max_tokens)
        return self.draft_cache.bytes_after(max(0, drafted_on - self.draft_cache.length))

    def _make_room(self, num_new: int) -> None:
        """Double the buffer until it has room for further tokens."""
        while self.num_tokens + num_new > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
