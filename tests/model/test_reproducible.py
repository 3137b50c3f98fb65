"""Reproducible mode: a row's result never depends, not in one bit, on batch mates or on chunking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Batch

DTYPES = ["float32", "float64"]


def logits_in_chunks(decoder, ids, sizes):
    """Return `[tokens, vocab]` of ids fed through one cache in pieces of the given sizes, the rest as one."""
    cache, rows, start = decoder.new_cache(), [], 0
    for size in [*sizes, len(ids)]:
        piece = ids[start : start + size]
        if len(piece):
            rows.append(decoder.head(decoder.forward(Batch.of([piece], [start]), [cache])))
            start += len(piece)
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 90), max_size=5))
def test_chunking_changes_no_bit(odd_decoder, dtype, sizes):
    """Any cut of a 150-token prompt gives the bits of one pass."""
    decoder = odd_decoder(numerics="reproducible", dtype=dtype)
    ids = np.random.default_rng(1).integers(0, 523, 150)
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    assert logits_in_chunks(decoder, ids, sizes).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_batch_mates_change_no_bit(odd_decoder, dtype, data):
    """A decode step beside any mix of other steps and chunks gives the bits of the step alone."""
    decoder = odd_decoder(numerics="reproducible", dtype=dtype)
    rng = np.random.default_rng(2)
    mates = data.draw(st.lists(st.integers(1, 40), max_size=6))
    place = data.draw(st.integers(0, len(mates)))
    cache = decoder.new_cache()
    decoder.forward(Batch.of([rng.integers(0, 523, 70)]), [cache])
    alone = decoder.head(decoder.forward(Batch.of([[7]], [70]), [cache.fork()]))
    sequences = [rng.integers(0, 523, length) for length in mates]
    sequences.insert(place, np.array([7]))
    caches = [decoder.new_cache() for _ in sequences]
    caches[place] = cache.fork()
    prefixes = [c.length for c in caches]
    batch = Batch.of(sequences, prefixes)
    row = int(batch.starts[place])
    hidden = decoder.forward(batch, caches)
    assert decoder.head(hidden)[row].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("name", ["llama_plain", "gpt2", "llama_mqa_bf16"])
def test_single_token_steps_change_no_bit(load_decoder, parity, name):
    """Decoding token by token gives the bits of prefill for heads that are not grouped, and for one key head."""
    decoder, ids = load_decoder(name, numerics="reproducible"), parity(name)["ids_40"]
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    assert logits_in_chunks(decoder, ids, [1] * 40).tobytes() == whole.tobytes()


def test_memory_past_the_end_of_a_cache_is_never_read(odd_decoder):
    """NaN left over in a cache's spare room cannot reach a result."""
    decoder = odd_decoder(numerics="reproducible")
    cache = decoder.new_cache(capacity=64)
    for layer in range(2):
        for array in cache.layer(layer):
            array[:] = np.nan
    hidden = decoder.forward(Batch.of([[1, 2, 3]]), [cache])
    assert hidden.tobytes() == decoder.forward(Batch.of([[1, 2, 3]])).tobytes()


def test_fast_and_reproducible_agree(odd_decoder):
    """The two modes differ in rounding only."""
    ids = np.random.default_rng(5).integers(0, 523, 150)
    fast, reproducible = (odd_decoder(numerics=mode).forward(Batch.of([ids])) for mode in ("fast", "reproducible"))
    np.testing.assert_allclose(fast, reproducible, rtol=0, atol=1e-4)
