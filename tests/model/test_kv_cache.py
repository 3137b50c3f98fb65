"""The key/value cache: room, bytes, copies."""

from __future__ import annotations

import numpy as np
import pytest
from treadle_plugin_api.backend import Batch
from treadle_server.model.kv_cache import BLOCK_TOKENS, KVCache


def test_bytes_are_those_of_keys_and_values_in_whole_blocks(odd_config):
    """2 layers x 2 x 2 heads x 26 numbers a token, rounded up to 64 tokens."""
    assert KVCache.bytes_for(odd_config, np.float32, 65) == 2 * 2 * 2 * 26 * 128 * 4
    assert KVCache(odd_config, np.float32, 65).num_bytes == KVCache.bytes_for(odd_config, np.float32, 65)
    assert KVCache(odd_config, np.float64).num_bytes == 0


def test_room_doubles_up_to_the_context_length(odd_config):
    """Appending grows 64, 128, 256, then to the context length's last block and only past it when asked to."""
    cache, capacities = KVCache(odd_config), []
    for _ in range(330):
        cache.make_room(1)
        cache.advance(1)
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [64, 128, 256, 320, 384]


def test_reserve_takes_exactly_what_is_asked_and_keeps_the_tokens(odd_config):
    """`reserve` rounds to a block, never shrinks, and copies what is stored."""
    cache = KVCache(odd_config, np.float32, 10)
    cache.layer(1)[0][:, :5] = 7
    cache.advance(5)
    cache.reserve(200)
    cache.reserve(20)
    assert cache.capacity == 256
    assert (cache.layer(1)[0][:, :5] == 7).all()


def test_a_fork_grows_apart(odd_decoder):
    """A fork continues like the original and neither sees the other's tokens."""
    decoder = odd_decoder()
    cache = decoder.new_cache()
    decoder.forward(Batch.of([[1, 2, 3]]), [cache])
    fork = cache.fork()
    decoder.forward(Batch.of([[9, 9]], [3]), [fork])
    step = decoder.forward(Batch.of([[4]], [3]), [cache])
    np.testing.assert_allclose(step[0], decoder.forward(Batch.of([[1, 2, 3, 4]]))[3], atol=2e-5)
    assert (cache.length, fork.length) == (4, 5)


def test_truncating_forgets(odd_decoder):
    """After truncation the cache continues as if the dropped tokens had never been."""
    decoder = odd_decoder()
    cache = decoder.new_cache()
    decoder.forward(Batch.of([[1, 2, 8, 8]]), [cache])
    cache.truncate(2)
    step = decoder.forward(Batch.of([[3]], [2]), [cache])
    np.testing.assert_allclose(step[0], decoder.forward(Batch.of([[1, 2, 3]]))[2], atol=2e-5)


def test_lengths_that_do_not_fit_are_refused(odd_config):
    """Truncating past the end and advancing past the room raise ValueError with both numbers."""
    cache = KVCache(odd_config, np.float32, 64)
    with pytest.raises(ValueError, match="between 0 and 0, but is 1"):
        cache.truncate(1)
    with pytest.raises(ValueError, match="advance by 65: 0 of 64"):
        cache.advance(65)


def test_growth_stops_at_the_tokens_that_will_ever_be_stored(odd_config):
    """Doubling never goes past `max_tokens`, so that a sequence holds no more than it was admitted with."""
    cache = KVCache(odd_config, max_tokens=3 * BLOCK_TOKENS)
    for _ in range(3):
        cache.make_room(BLOCK_TOKENS)
        cache.advance(BLOCK_TOKENS)
    assert cache.num_bytes == KVCache.bytes_for(odd_config, np.float32, 3 * BLOCK_TOKENS)
    assert cache.fork().max_tokens == 3 * BLOCK_TOKENS
