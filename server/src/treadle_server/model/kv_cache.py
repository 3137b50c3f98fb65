"""The keys and values of one sequence: contiguous, growing by doubling, counted in bytes.

One array of `[layers, 2, kv_heads, capacity, head_dim]`; keys are stored rotated. Room is made in blocks of
`BLOCK_TOKENS`, the block of keys that the reproducible attention sums over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import DecoderConfig

BLOCK_TOKENS = 64


class KVCache:
    """Keys and values of one sequence. Not shared between threads.

    Args:
        config: the decoder's.
        dtype: number type of the entries.
        capacity: tokens to make room for at once.
        max_tokens: tokens that will ever be stored; growth stops there. The context length when not given.

    Attributes:
        capacity: tokens there is room for.
    """

    def __init__(
        self, config: DecoderConfig, dtype: DTypeLike = np.float32, capacity: int = 0, max_tokens: int | None = None
    ) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.max_tokens = config.context_length if max_tokens is None else max_tokens
        self._length = 0
        self.capacity = _whole_blocks(capacity)
        self._storage = self._allocate(self.capacity)

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Bytes held, room for further tokens included."""
        return self._storage.nbytes

    @staticmethod
    def bytes_for(config: DecoderConfig, dtype: DTypeLike, num_tokens: int) -> int:
        """Return the bytes of a cache with room for `num_tokens`; one that grew by appending holds up to twice that."""
        heads = config.num_layers * 2 * config.attention.num_kv_heads
        return heads * config.attention.head_dim * _whole_blocks(num_tokens) * np.dtype(dtype).itemsize

    def layer(self, index: int) -> tuple[Array, Array]:
        """Return a layer's keys and values, both `[kv_heads, capacity, head_dim]`, as writable views."""
        layer = self._storage[index]
        return layer[0], layer[1]

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all, to the next block; never shrinks."""
        if num_tokens > self.capacity:
            capacity = _whole_blocks(num_tokens)
            storage = self._allocate(capacity)
            storage[..., : self._length, :] = self._storage[..., : self._length, :]
            self._storage, self.capacity = storage, capacity

    def make_room(self, num_new: int) -> None:
        """Make room for further tokens, at least doubling when that is needed, up to `max_tokens`."""
        self.reserve(self._grown_capacity(num_new))

    def bytes_after(self, num_new: int) -> int:
        """Return the bytes that will be held once there is room for `num_new` further tokens."""
        if self._length + num_new <= self.capacity:
            return self.num_bytes
        return self.bytes_for(self.config, self.dtype, self._grown_capacity(num_new))

    def _grown_capacity(self, num_new: int) -> int:
        needed = self._length + num_new
        if needed <= self.capacity:
            return self.capacity
        return max(needed, min(2 * self.capacity, self.max_tokens))

    def release(self) -> None:
        """Forget every token and give the memory back."""
        self._length = self.capacity = 0
        self._storage = self._allocate(0)

    def advance(self, num_new: int) -> None:
        """Count tokens that a forward pass has written past the end."""
        if not 0 <= num_new <= self.capacity - self._length:
            raise ValueError(f"cannot advance by {num_new}: {self._length} of {self.capacity} tokens are stored")
        self._length += num_new

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; the room stays."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be between 0 and {self._length}, but is {length}")
        self._length = length

    def copy_out(self, start: int, stop: int) -> Array:
        """Return a copy of the tokens from start to stop, `[layers, 2, kv_heads, stop - start, head_dim]`."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(f"tokens {start} to {stop} are not stored: there are {self._length}")
        return self._storage[..., start:stop, :].copy()

    def extend(self, entries: Array) -> None:
        """Append tokens that `copy_out` returned, of a cache of this shape."""
        count = entries.shape[3]
        self.reserve(self._length + count)
        self._storage[..., self._length : self._length + count, :] = entries
        self._length += count

    def entry_bytes(self, num_tokens: int) -> int:
        """Return the bytes that `copy_out` of so many tokens takes."""
        layers, pair, heads, _, head_dim = self._storage.shape
        return int(layers * pair * heads * num_tokens * head_dim * self.dtype.itemsize)

    def fork(self) -> KVCache:
        """Return a copy that grows apart from this one."""
        copy = KVCache(self.config, self.dtype, self._length, self.max_tokens)
        copy._storage[..., : self._length, :] = self._storage[..., : self._length, :]
        copy._length = self._length
        return copy

    def _allocate(self, capacity: int) -> Array:
        attention = self.config.attention
        shape = (self.config.num_layers, 2, attention.num_kv_heads, capacity, attention.head_dim)
        return np.empty(shape, self.dtype)


class ScratchCache:
    """A cache view whose layers share one buffer: enough for a forward pass that nothing continues."""

    length = 0

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, num_tokens: int) -> None:
        attention = config.attention
        shape = (2, attention.num_kv_heads, _whole_blocks(num_tokens), attention.head_dim)
        keys, values = np.empty(shape, dtype)
        self._views = (keys, values)

    def layer(self, index: int) -> tuple[Array, Array]:
        """Return the shared buffer's keys and values, both `[kv_heads, capacity, head_dim]`."""
        return self._views


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
