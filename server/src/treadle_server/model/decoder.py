"""The decoder: a config, its parameters prepared by a compute backend, and two calls, `forward` and `head`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
from treadle_plugin_api.backend import Adapter, Array, Batch, ComputeBackend, Observer, Weight
from treadle_plugin_api.backend_factory import BackendFactory
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.errors import ConfigError
from treadle_server.model.adapters import check_adapter
from treadle_server.model.kv_cache import KVCache, ScratchCache
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend

_LOG = logging.getLogger(__name__)

DTypeName = Literal["float32", "float64"]
Numerics = Literal["fast", "reproducible"]
Quantised = Literal["int8", "int4"]
Activations = Literal["float32", "bf16"]

# What `auto` takes where a plugin has it and the number type suits it, but for small models.
AUTO_BACKEND = "kernels"


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
        self.cache_dtype = self.backend.cache_dtype(self._prepared)
        self._fitting: WeakSet[Adapter] = WeakSet()

    def forward(self, batch: Batch, caches: Sequence[KVCache] | None = None, observe: Observer | None = None) -> Array:
        """Return `hidden [tokens, dim]` of the batch's new tokens and append their keys and values to the caches.

        caches[i] belongs to sequence i and must hold prefix_lengths[i] tokens. Without caches every sequence starts at
        position 0 and nothing is kept. Raises ValueError for ids, lengths or positions that the model does not have.
        """
        lengths = self._check(batch, caches)
        if caches is None:
            scratch = [ScratchCache(self.config, self.cache_dtype, length) for length in lengths]
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
        """Return an empty cache of this decoder's shape and number type."""
        return KVCache(self.config, self.cache_dtype, capacity, max_tokens)

    def cache_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a cache with room for so many tokens."""
        return KVCache.bytes_for(self.config, self.cache_dtype, num_tokens)

    def _check(self, batch: Batch, caches: Sequence[KVCache] | None) -> list[int]:
        """Return the new tokens of each sequence; raise ValueError for a batch that the model or the caches do not fit.

        In lists: a step has few numbers, for which array operations take longer.
        """
        if {array.ndim for array in (batch.token_ids, batch.starts, batch.prefix_lengths)} != {1}:
            raise ValueError("ids, starts and prefix lengths of a batch must each be one row")
        ids, starts, prefixes = batch.token_ids.tolist(), batch.starts.tolist(), batch.prefix_lengths.tolist()
        lengths = [stop - start for start, stop in pairwise(starts)]
        if not lengths or len(lengths) != len(prefixes) or min(lengths) < 1:
            raise ValueError("a batch needs a sequence, and each sequence a prefix length and one new token at least")
        if (starts[0], starts[-1]) != (0, len(ids)):
            raise ValueError(f"the starts of a batch of {len(ids)} ids go from {starts[0]} to {starts[-1]}")
        if not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise ValueError(f"token ids must be between 0 and {self.config.vocab_size - 1}")
        held = [0] * len(prefixes) if caches is None else [cache.length for cache in caches]
        if held != prefixes:
            raise ValueError(f"prefix_lengths are {prefixes}, but the caches hold {held} tokens")
        if caches is not None and len(set(map(id, caches))) != len(caches):
            raise ValueError("two sequences of a batch have the same cache")
        longest = max(map(add, prefixes, lengths))
        if self.config.positions.has_hard_limit and longest > self.config.context_length:
            raise ValueError(
                f"a sequence has {longest} tokens, but the model has {self.config.context_length} positions"
            )
        self._check_adapters(batch)
        return lengths

    def _check_adapters(self, batch: Batch) -> None:
        """Look at each adapter once: it is immutable, and a step must not pay for it."""
        if batch.adapters is None:
            return
        if len(batch.adapters) != batch.num_sequences:
            raise ValueError(f"a batch of {batch.num_sequences} sequences has {len(batch.adapters)} adapters")
        for adapter in batch.adapters:
            if adapter is not None and adapter not in self._fitting:
                check_adapter(self.config, self.dtype, adapter)
                self._fitting.add(adapter)


def make_backend(
    name: str,
    dtype: DTypeName,
    numerics: Numerics,
    plugged: Mapping[str, BackendFactory] = MappingProxyType({}),
    *,
    quantize: Quantised | None = None,
    activations: Activations = "float32",
    small: bool = False,
) -> ComputeBackend[Any]:
    """Return the named backend: NumPy's, one of the plugged ones, or for `auto` the preferred one that suits.

    For a small model `auto` is NumPy's: it is fast enough, and there at once where the other first compiles.
    Raises ConfigError for a name that is not there, a number type that the backend lacks, and where a plugin cannot
    make its own.
    """
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be float32 or float64, but is {dtype!r}")
    if numerics not in ("fast", "reproducible"):
        raise ValueError(f"numerics must be fast or reproducible, but is {numerics!r}")
    if quantize not in (None, "int8", "int4"):
        raise ValueError(f"quantize must be int8 or int4, but is {quantize!r}")
    if activations not in ("float32", "bf16"):
        raise ValueError(f"activations must be float32 or bf16, but is {activations!r}")
    if quantize is not None or activations != "float32":
        name = _able_backend(name, dtype, quantize, activations, plugged)
    if name == "auto" and not small and AUTO_BACKEND in plugged and dtype in plugged[AUTO_BACKEND].dtypes:
        try:
            return make_backend(AUTO_BACKEND, dtype, numerics, plugged)
        except ConfigError as error:
            _LOG.warning("NumPy computes instead: %s", error)
    if name in ("auto", "numpy"):
        return NumpyBackend(dtype) if numerics == "fast" else ReproducibleNumpyBackend(dtype)
    if name not in plugged:
        raise ConfigError(f"there is no compute backend {name!r}; available: {', '.join(['auto', 'numpy', *plugged])}")
    factory = plugged[name]
    if dtype not in factory.dtypes:
        raise ConfigError(f"the compute backend {name!r} computes in {', '.join(factory.dtypes)}, not in {dtype}")
    try:
        rounding = {} if activations == "float32" else {"activations": activations}
        return factory.make(dtype, numerics, **rounding)
    except Exception as error:  # a plugin's factory may raise anything
        raise ConfigError(f"the compute backend {name!r} cannot be made: {type(error).__name__}: {error}") from error


def _able_backend(
    name: str,
    dtype: DTypeName,
    quantize: Quantised | None,
    activations: Activations,
    plugged: Mapping[str, BackendFactory],
) -> str:
    """Return the name of a backend that does what is asked beyond the usual: the named one, for `auto` any."""
    willing = {
        one: factory
        for one, factory in plugged.items()
        if (quantize is None or quantize in factory.keeps) and activations in factory.activations
    }
    able = [one for one, factory in willing.items() if dtype in factory.dtypes]
    if name == "auto" and able:
        return AUTO_BACKEND if AUTO_BACKEND in able else able[0]
    if name not in able:
        asked = [f"quantize is {quantize}"] if quantize is not None else []
        asked += [f"activations is {activations}"] if activations != "float32" else []
        known = "; ".join(f"{one} does in {', '.join(factory.dtypes)}" for one, factory in willing.items())
        known = known or "no installed one does; treadle-kernels has one"
        raise ConfigError(
            f"{' and '.join(asked)}, but the compute backend {name!r} does not take it in {dtype}; {known}"
        )
    return name
