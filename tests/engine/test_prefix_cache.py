"""The prefix cache gives back what was stored, token for token, and never holds more than it may."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_plugin_api.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, PositionsConfig
from treadle_server.engine.prefix_cache import PrefixCache
from treadle_server.model.kv_cache import BLOCK_TOKENS, KVCache

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=10,
    dim=4,
    num_layers=2,
    context_length=1024,
    norm=NormConfig(kind="rms", eps=1e-5, bias=False),
    positions=PositionsConfig(kind="none"),
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0),
    mlp=MlpConfig(hidden_dim=4, activation="silu"),
    tied_head=True,
)
TOKEN_BYTES = KVCache(CONFIG).entry_bytes(1)


def ids_of(tokens: Sequence[int]) -> np.ndarray:
    """Token ids."""
    return np.array(tokens, np.int64)


def computed(tokens: Sequence[int]) -> KVCache:
    """A cache as a model would fill it: every entry is a function of all tokens up to its own."""
    cache = KVCache(CONFIG)
    numbers = np.cumsum(ids_of(tokens) * 31 + np.arange(len(tokens)) ** 2).astype(np.float32)
    cache.extend(np.broadcast_to(numbers[None, None, None, :, None], (2, 2, 1, len(tokens), 2)))
    return cache


def loaded(prefixes: PrefixCache, tokens: Sequence[int], key: object = 1) -> int:
    """How many tokens are known; their entries are checked."""
    cache = KVCache(CONFIG)
    count = prefixes.load(key, ids_of(tokens), cache)
    assert cache.length == count
    np.testing.assert_array_equal(cache.copy_out(0, count), computed(tokens).copy_out(0, count))
    return count


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


texts = st.lists(st.integers(0, 1), min_size=1, max_size=3).flatmap(
    lambda head: st.integers(0, 3 * BLOCK_TOKENS).map(lambda size: (head * (size + 1))[: size + 1])
)


@given(st.lists(texts, max_size=8), texts)
def test_the_longest_known_beginning_is_found(stored: list[list[int]], wanted: list[int]):
    """Without a limit: the longest beginning that any stored text has in common, to the token."""
    prefixes = PrefixCache(1 << 30)
    for tokens in stored:
        prefixes.store(1, ids_of(tokens), computed(tokens))
    assert loaded(prefixes, wanted) == max((common(tokens, wanted) for tokens in stored), default=0)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=20), st.integers(0, 6 * BLOCK_TOKENS))
def test_bytes_are_bounded_and_counted(uses: list[tuple[list[int], bool]], max_tokens: int):
    """Whatever is stored and looked for, what is held is under the limit and is what the blocks take."""
    prefixes = PrefixCache(max_tokens * TOKEN_BYTES)
    for tokens, storing in uses:
        if storing:
            prefixes.store(1, ids_of(tokens), computed(tokens))
        else:
            loaded(prefixes, tokens)
        assert prefixes.num_bytes == sum(block.entries.nbytes for block in prefixes._recency) <= prefixes.max_bytes
        assert all(block.parent in prefixes._recency or block.parent.parent is None for block in prefixes._recency)


def test_a_shared_beginning_is_held_once():
    """Two chats with one system prompt share its blocks."""
    prefixes = PrefixCache(1 << 30)
    system = [1, 2] * BLOCK_TOKENS
    for answer in (3, 4):
        prefixes.store(1, ids_of([*system, answer]), computed([*system, answer]))
    assert prefixes.num_bytes == (len(system) + 2) * TOKEN_BYTES


def test_a_grown_text_takes_the_place_of_its_beginning():
    """The next turn of a chat leaves no second copy of the last one's end."""
    prefixes = PrefixCache(1 << 30)
    tokens = [1, 2, 3] * 40
    for size in (70, 90, 120):
        prefixes.store(1, ids_of(tokens[:size]), computed(tokens[:size]))
    assert prefixes.num_bytes == 120 * TOKEN_BYTES


def test_the_least_recently_used_goes_first():
    """One that was looked for is younger than one that was stored after it."""
    prefixes = PrefixCache(2 * BLOCK_TOKENS * TOKEN_BYTES)
    first, second, third = ([token] * BLOCK_TOKENS for token in (1, 2, 3))
    for tokens in (first, second):
        prefixes.store(1, ids_of(tokens), computed(tokens))
    assert loaded(prefixes, first) == BLOCK_TOKENS
    prefixes.store(1, ids_of(third), computed(third))
    assert [loaded(prefixes, tokens) for tokens in (first, second, third)] == [BLOCK_TOKENS, 0, BLOCK_TOKENS]


def test_keys_are_apart():
    """Numbers of one key are never those of another."""
    prefixes = PrefixCache(1 << 30)
    prefixes.store("old", ids_of([1, 2, 3]), computed([1, 2, 3]))
    prefixes.store("new", ids_of([1, 2]), computed([1, 2]))
    assert (loaded(prefixes, [1, 2, 3], "old"), loaded(prefixes, [1, 2, 3], "new")) == (3, 2)


def test_clearing_gives_all_memory_back():
    """Nothing is known afterwards, and what was known can be stored again."""
    prefixes = PrefixCache(1 << 30)
    prefixes.store(1, ids_of([1, 2]), computed([1, 2]))
    prefixes.clear()
    assert (loaded(prefixes, [1, 2]), prefixes.num_bytes) == (0, 0)
    prefixes.store(1, ids_of([1, 2]), computed([1, 2]))
    assert loaded(prefixes, [1, 2]) == 2


def test_hits_are_counted():
    """Tokens found and tokens looked for."""
    prefixes = PrefixCache(1 << 30)
    prefixes.store(1, ids_of([1, 2, 3]), computed([1, 2, 3]))
    loaded(prefixes, [1, 2, 4, 5])
    assert (prefixes.num_hit_tokens, prefixes.num_queried_tokens) == (2, 4)


def test_nothing_is_kept_without_memory():
    """A limit of 0 turns it off."""
    prefixes = PrefixCache(0)
    prefixes.store(1, ids_of([1]), computed([1]))
    assert (loaded(prefixes, [1]), prefixes.num_bytes) == (0, 0)


def test_only_what_is_stored_can_be_copied():
    """A cache refuses to copy tokens that it does not hold."""
    with pytest.raises(ValueError, match="tokens 0 to 3 are not stored: there are 2"):
        computed([1, 2]).copy_out(0, 3)
