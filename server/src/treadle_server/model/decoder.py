"""The decoder: a config, its parameters prepared by a compute backend, and two calls, `forward` and `head`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from treadle_plugin_api.backend import Array, Batch, ComputeBackend, Observer, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model.kv_cache import KVCache, ScratchCache
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend

DTypeName = Literal["float32", "float64"]
Numerics = Literal["fast", "reproducible"]


class Decoder:
    """A model that can run. Holds no state of a request; one thread at a time uses its caches."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Mapping[str, Weight],
        *,
        backend: str | ComputeBackend[Any] = "numpy",
        dtype: DTypeName = "float32",
        numerics: Numerics = "fast",
    ) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.numerics = numerics
        self.backend = make_backend(backend, dtype, numerics) if isinstance(backend, str) else backend
        self._prepared = self.backend.prepare(config, params)

    def forward(self, batch: Batch, caches: Sequence[KVCache] | None = None, observe: Observer | None = None) -> Array:
        """Return `hidden [tokens, dim]` of the batch's new tokens and append their keys and values to the caches.

        caches[i] belongs to sequence i and must hold prefix_lengths[i] tokens. Without caches every sequence starts at
        position 0 and nothing is kept. Raises ValueError for ids, lengths or positions that the model does not have.
        """
        self._check(batch, caches)
        lengths = np.diff(batch.starts).tolist()
        if caches is None:
            scratch = [ScratchCache(self.config, self.dtype, length) for length in lengths]
            return self.backend.forward(self._prepared, batch, scratch, observe)
        for cache, length in zip(caches, lengths, strict=True):
            cache.make_room(length)
        hidden = self.backend.forward(self._prepared, batch, caches, observe)
        for cache, length in zip(caches, lengths, strict=True):
            cache.advance(length)
        return hidden

    def head(self, hidden: Array, observe: Observer | None = None) -> Array:
        """Return `logits [rows, vocab]` of `hidden [rows, dim]`, in the decoder's dtype."""
        return self.backend.head(self._prepared, hidden, observe)

    def new_cache(self, capacity: int = 0, max_tokens: int | None = None) -> KVCache:
        """Return an empty cache of this decoder's shape and dtype."""
        return KVCache(self.config, self.dtype, capacity, max_tokens)

    def _check(self, batch: Batch, caches: Sequence[KVCache] | None) -> None:
        if batch.num_tokens and not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.config.vocab_size:
            raise ValueError(f"token ids must be between 0 and {self.config.vocab_size - 1}")
        held = [0] * batch.num_sequences if caches is None else [cache.length for cache in caches]
        if held != batch.prefix_lengths.tolist():
            raise ValueError(f"prefix_lengths are {batch.prefix_lengths.tolist()}, but the caches hold {held} tokens")
        lengths = np.diff(batch.starts)
        if len(lengths) != batch.num_sequences or batch.starts[-1] != batch.num_tokens or lengths.min(initial=1) < 1:
            raise ValueError("every sequence of a batch needs a prefix length and one new token at least")
        longest = int((batch.prefix_lengths + lengths).max(initial=0))
        if self.config.positions.has_hard_limit and longest > self.config.context_length:
            raise ValueError(
                f"a sequence has {longest} tokens, but the model has {self.config.context_length} positions"
            )


def make_backend(name: str, dtype: DTypeName, numerics: Numerics) -> ComputeBackend[Any]:
    """Return the named built-in backend."""
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be float32 or float64, but is {dtype!r}")
    if numerics not in ("fast", "reproducible"):
        raise ValueError(f"numerics must be fast or reproducible, but is {numerics!r}")
    if name not in ("auto", "numpy"):
        raise ValueError(f"there is no compute backend {name!r}; available: auto, numpy")
    return NumpyBackend(dtype) if numerics == "fast" else ReproducibleNumpyBackend(dtype)
