"""Reproducible mode: a row's result never depends, not in one bit, on batch mates or on chunking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Batch
from treadle_plugin_api.decoder_config import DecoderConfig, MoeConfig, NormConfig, PositionsConfig
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays

DTYPES = ["float32", "float64"]


def logits_in_chunks(decoder, ids, sizes):
    """Return `[tokens, vocab]` of ids fed through one cache in pieces of the given sizes, the rest as one."""
    cache, rows, start = decoder.new_cache(), [], 0
    for size in [*sizes, len(ids)]:
        piece = ids[start : start + size]
        if len(piece):
            batch = Batch.of([piece], [start], [len(ids)])
            rows.append(decoder.head(decoder.forward(batch, [cache])))
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


def odd_variants(odd_config) -> dict[str, DecoderConfig]:
    """The odd sizes with every feature that makes scores, norms or experts, in two decoders."""
    attention, norm = odd_config.attention, odd_config.norm
    moe = MoeConfig(num_experts=5, top_k=2, hidden_dim=77, shared_dim=51, shared_gate=True, layers=(True, False))
    return {
        "windows, caps, experts": replace(
            odd_config,
            norm=replace(norm, place="sandwich", unit_offset=True),
            attention=replace(attention, windows=(20, None), softcap=5.0, qk_norm="head", clip_qkv=1.5),
            mlp=replace(odd_config.mlp, activation="gelu"),
            moe=moe,
            logit_softcap=20.0,
        ),
        "alibi, layer norms, parallel": replace(
            odd_config,
            norm=NormConfig(kind="layer", eps=1e-5, bias=True),
            positions=PositionsConfig(kind="alibi"),
            attention=replace(attention, qk_norm="each_head", qkv_bias=True, inverse_layer_scale=True),
            mlp=replace(odd_config.mlp, activation="relu_squared", gated=False, bias=True),
            residual="parallel",
            embedding_norm=True,
            embedding_dim=31,
        ),
        "whole norms behind, quick gelu": replace(
            odd_config,
            norm=replace(norm, place="output"),
            attention=replace(attention, qk_norm="whole"),
            mlp=replace(odd_config.mlp, activation="gelu_quick"),
            residual_scale=0.3,
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "variant", ["windows, caps, experts", "alibi, layer norms, parallel", "whole norms behind, quick gelu"]
)
def test_no_feature_lets_a_bit_change_at_sizes_that_fit_no_kernel(odd_config, variant, dtype):
    """Any cut, and any batch mates, give the bits of one pass: vector units' leftovers and experts' rows included."""
    config = odd_variants(odd_config)[variant]
    params = Params.from_arrays(random_arrays(config, seed=3, scale=0.1))
    decoder = Decoder(config, params, numerics="reproducible", dtype=dtype)
    ids = np.random.default_rng(1).integers(0, 523, 150)
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    for sizes in ([1] * 150, [7] * 30, [90, 1, 33]):
        assert logits_in_chunks(decoder, ids, sizes).tobytes() == whole.tobytes()
    beside = decoder.head(decoder.forward(Batch.of([ids[:5], ids, ids[40:100]])))
    assert beside[5:155].tobytes() == whole.tobytes()


@settings(max_examples=3, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), max_size=4))
def test_chunking_changes_no_bit_in_any_family(load_decoder, any_model, sizes):
    """A 100-token prompt cut anywhere, over several key blocks, gives the bits of one pass."""
    decoder = load_decoder(any_model, numerics="reproducible")
    ids = np.random.default_rng(1).integers(0, decoder.config.vocab_size, 100)
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    assert logits_in_chunks(decoder, ids, sizes).tobytes() == whole.tobytes()


def test_single_token_steps_and_batch_mates_change_no_bit_in_any_family(load_decoder, parity, any_model):
    """Decoding token by token, and prefill beside two other sequences, give the bits of prefill alone."""
    decoder, ids = load_decoder(any_model, numerics="reproducible"), parity(any_model)["ids_40"]
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    assert logits_in_chunks(decoder, ids, [1] * 40).tobytes() == whole.tobytes()
    beside = decoder.head(decoder.forward(Batch.of([ids[:3], ids, ids[5:30]])))
    assert beside[3:43].tobytes() == whole.tobytes()


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
