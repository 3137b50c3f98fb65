"""The forward pass: caches, batches, observers, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Batch
from treadle_server.errors import ConfigError
from treadle_server.model import attention
from treadle_server.model.decoder import Decoder

ATOL = 2e-5


def run_in_chunks(decoder: Decoder, ids, sizes) -> np.ndarray:
    """Feed ids through one cache in pieces of the given sizes (the rest as one), and return all hidden states."""
    cache, hidden, start = decoder.new_cache(), [], 0
    for size in [*sizes, len(ids)]:
        piece = ids[start : start + size]
        if len(piece):
            hidden.append(decoder.forward(Batch.of([piece], [start], [len(ids)]), [cache]))
            start += len(piece)
    return np.concatenate(hidden)


def random_ids(decoder: Decoder, length: int, seed: int = 0) -> np.ndarray:
    """Draw token ids `[length]`."""
    return np.random.default_rng(seed).integers(0, decoder.config.vocab_size, length)


@settings(max_examples=5, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), max_size=12))
def test_chunks_of_any_size_equal_one_pass(load_decoder, parity, any_model, sizes):
    """A prompt cut anywhere and decoded through the cache has the hidden states of one pass without a cache."""
    decoder, ids = load_decoder(any_model), parity(any_model)["ids_40"]
    full = decoder.forward(Batch.of([ids]))
    np.testing.assert_allclose(run_in_chunks(decoder, ids, sizes), full, rtol=0, atol=ATOL)


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_sequences_in_one_batch_do_not_mix(load_decoder, any_model, data):
    """Each sequence of a batch of prefill chunks and decode steps has the result of running alone."""
    decoder = load_decoder(any_model)
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=5))
    sequences = [random_ids(decoder, prefix + new, seed) for seed, (prefix, new) in enumerate(lengths)]
    prompts = [len(ids) for ids in sequences]
    caches = [decoder.new_cache() for _ in lengths]
    for cache, ids, (prefix, _) in zip(caches, sequences, lengths, strict=True):
        if prefix:
            decoder.forward(Batch.of([ids[:prefix]], [0], [len(ids)]), [cache])
    new = [ids[prefix:] for ids, (prefix, _) in zip(sequences, lengths, strict=True)]
    batch = Batch.of(new, [prefix for prefix, _ in lengths], prompts)
    together = decoder.forward(batch, caches)
    alone = [decoder.forward(Batch.of([ids]))[prefix:] for ids, (prefix, _) in zip(sequences, lengths, strict=True)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=ATOL)
    assert [cache.length for cache in caches] == [sum(pair) for pair in lengths]


@pytest.mark.parametrize("name", ["mistral_sw8", "gemma2", "bloom", "falcon_alibi"])
def test_what_shapes_scores_holds_in_blocks_and_over_many_keys(load_decoder, name, monkeypatch):
    """Windows, soft-caps and biases are the same when query rows are cut, and in the product for many keys."""
    decoder = load_decoder(name, dtype="float64")
    ids = random_ids(decoder, 100)
    whole = decoder.forward(Batch.of([ids]))
    monkeypatch.setattr(attention, "MAX_SCORES", 1000)
    np.testing.assert_allclose(decoder.forward(Batch.of([ids])), whole, rtol=0, atol=1e-12)
    monkeypatch.setattr(attention, "MANY_KEYS", 4)
    np.testing.assert_allclose(run_in_chunks(decoder, ids, [60] + [1] * 40), whole, rtol=0, atol=1e-12)


def test_a_window_hides_all_but_the_last_tokens(load_decoder):
    """With a window of 8 the observed weights are zero before the last eight keys and sum to one."""
    decoder, seen = load_decoder("mistral_sw8", dtype="float64"), {}
    decoder.forward(Batch.of([random_ids(decoder, 20)]), observe=seen.__setitem__)
    weights = seen["layers.0.attention.weights"]
    distance = np.arange(20)[:, None] - np.arange(20)[None]
    assert ((weights > 0) == ((distance >= 0) & (distance < 8))).all()
    np.testing.assert_allclose(weights.sum(-1), 1)


def test_only_chosen_experts_compute(load_decoder, monkeypatch):
    """A decoded token multiplies with the router and its top_k experts, no other."""
    decoder = load_decoder("mixtral")
    used = []
    apply = type(decoder.backend)._apply_expert
    monkeypatch.setattr(type(decoder.backend), "_apply_expert", lambda *args: used.append(id(args[2])) or apply(*args))
    cache = decoder.new_cache()
    decoder.forward(Batch.of([[7]]), [cache])
    assert len(used) == decoder.config.moe.top_k * decoder.config.num_layers


def test_experts_are_seen_by_an_observer(load_decoder):
    """Router scores, the chosen ids and their weights are shown for each layer with experts, shared ones too."""
    decoder, seen = load_decoder("qwen2_moe"), {}
    decoder.forward(Batch.of([[7, 8, 9]]), observe=seen.__setitem__)
    moe = decoder.config.moe
    see = {name.removeprefix("layers.0.mlp."): array.shape for name, array in seen.items()}
    assert see["router"] == (3, moe.num_experts)
    assert see["expert_ids"] == see["expert_weights"] == (3, moe.top_k)
    assert see["shared"] == see["down"] == (3, decoder.config.dim)


def test_scores_in_blocks_equal_scores_at_once(odd_decoder, monkeypatch):
    """Cutting the query rows to bound memory changes nothing."""
    decoder = odd_decoder(dtype="float64")
    ids = random_ids(decoder, 120)
    whole = decoder.forward(Batch.of([ids]))
    monkeypatch.setattr(attention, "MAX_SCORES", 1000)
    np.testing.assert_allclose(decoder.forward(Batch.of([ids])), whole, rtol=0, atol=1e-12)


def test_a_step_over_many_keys_equals_the_full_pass(odd_decoder, monkeypatch):
    """The product that decoding uses past MANY_KEYS keys gives what the full pass gives."""
    decoder = odd_decoder(dtype="float64")
    ids = random_ids(decoder, 90)
    full = decoder.forward(Batch.of([ids]))
    monkeypatch.setattr(attention, "MANY_KEYS", 8)
    np.testing.assert_allclose(run_in_chunks(decoder, ids, [60] + [1] * 30), full, rtol=0, atol=1e-12)


def test_prefill_does_not_hold_all_scores_at_once(odd_decoder, monkeypatch):
    """Memory of a pass stays far below tokens x tokens for all heads."""
    import tracemalloc

    monkeypatch.setattr(attention, "MAX_SCORES", 1 << 14)
    decoder = odd_decoder()
    ids = random_ids(decoder, 1000)
    tracemalloc.start()
    decoder.forward(Batch.of([ids]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 1000 * 6 * 4 / 2


def test_float64_and_float32_agree(odd_decoder):
    """Both dtypes compute the same model; each answers in its own."""
    ids = random_ids(odd_decoder(), 30)
    single, double = (
        decoder.head(decoder.forward(Batch.of([ids]))) for decoder in (odd_decoder(), odd_decoder(dtype="float64"))
    )
    assert (single.dtype, double.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(single, double, rtol=0, atol=1e-4)


def test_observing_shows_every_named_matrix_and_changes_nothing(odd_decoder):
    """An observer sees each layer's intermediates in the documented shapes; the result is the unobserved one."""
    decoder, seen = odd_decoder(), {}
    batch = Batch.of([random_ids(decoder, 7)])
    hidden = decoder.forward(batch, observe=seen.__setitem__)
    decoder.head(hidden, observe=seen.__setitem__)
    np.testing.assert_array_equal(hidden, decoder.forward(batch))
    shapes = {name.removeprefix("layers.1."): array.shape for name, array in seen.items() if "layers.0" not in name}
    assert shapes == {
        "embedding": (7, 150),
        "attention_norm": (7, 150),
        "attention.q": (6, 7, 26),
        "attention.k": (2, 7, 26),
        "attention.v": (2, 7, 26),
        "attention.q_rotated": (6, 7, 26),
        "attention.k_rotated": (2, 7, 26),
        "attention.scores": (6, 7, 7),
        "attention.scaled_scores": (6, 7, 7),
        "attention.masked_scores": (6, 7, 7),
        "attention.weights": (6, 7, 7),
        "attention.heads": (7, 156),
        "attention.projection": (7, 150),
        "attention_residual": (7, 150),
        "mlp_norm": (7, 150),
        "mlp.gate": (7, 333),
        "mlp.up": (7, 333),
        "mlp.activated": (7, 333),
        "mlp.down": (7, 150),
        "mlp_residual": (7, 150),
        "final_norm": (7, 150),
        "logits": (7, 523),
    }


def test_observed_attention_follows_its_formula(odd_decoder):
    """Scores are q k^T of the head's own group, masked above the diagonal; weights are their softmax."""
    decoder, seen = odd_decoder(dtype="float64"), {}
    decoder.forward(Batch.of([random_ids(decoder, 9)]), observe=seen.__setitem__)
    see = {name.removeprefix("layers.0.attention."): array for name, array in seen.items()}
    keys = see["k_rotated"].repeat(3, axis=0)
    scores = see["q_rotated"] @ keys.transpose(0, 2, 1)
    np.testing.assert_allclose(see["scores"], scores, atol=1e-12)
    masked = np.where(np.tri(9, dtype=bool), scores * 26**-0.5, -np.inf)
    np.testing.assert_allclose(see["masked_scores"], masked, atol=1e-12)
    weights = np.exp(masked) / np.exp(masked).sum(-1, keepdims=True)
    np.testing.assert_allclose(see["weights"], weights, atol=1e-12)
    heads = weights @ see["v"].repeat(3, axis=0)
    np.testing.assert_allclose(see["heads"], heads.transpose(1, 0, 2).reshape(9, -1), atol=1e-12)


def flat(ids: object, starts: list[int], prefix_lengths: list[int]) -> Batch:
    """Make a batch of parts that need not fit."""
    return Batch(np.array(ids, np.int64), np.array(starts, np.int64), np.array(prefix_lengths, np.int64))


BAD_BATCHES = [
    (Batch.of([[0, 523]]), "token ids must be between 0 and 522"),
    (Batch.of([[-1]]), "token ids must be between 0 and 522"),
    (Batch.of([[1]], [4]), "prefix_lengths"),
    (Batch.of([[1], []]), "one new token"),
    (Batch.of([]), "needs a sequence"),
    (Batch.of([[[1, 2], [3, 4]]]), "one row"),
    (flat([1, 2, 3], [1, 4], [0]), "of 3 ids go from 1 to 4"),
    (flat([1, 2, 3], [-5, -2], [0]), "of 3 ids go from -5 to -2"),
    (flat([1, 2, 3], [0, 2], [0]), "of 3 ids go from 0 to 2"),
    (flat([1, 2], [5, 6, 7], [0, 0]), "of 2 ids go from 5 to 7"),
    (flat([1, 2], [0, 2, 1], [0, 0]), "one new token"),
    (flat([1, 2], [0, 2], [0, 0]), "a prefix length"),
    (flat([], [], []), "needs a sequence"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_refused(odd_decoder, batch, message):
    """Ids outside the vocabulary, wrong prefix lengths and starts, and empty sequences raise ValueError."""
    with pytest.raises(ValueError, match=message):
        odd_decoder().forward(batch)


def test_a_cache_belongs_to_one_sequence(odd_decoder):
    """Two sequences of a batch that name the same cache are refused, and nothing is written to it."""
    decoder = odd_decoder()
    cache = decoder.new_cache()
    with pytest.raises(ValueError, match="same cache"):
        decoder.forward(Batch.of([[1], [2]]), [cache, cache])
    assert cache.length == 0


def test_learned_positions_end_at_the_context_length(load_decoder):
    """The last position of a learned table works; the next one is refused, whole or by decoding."""
    decoder = load_decoder("gpt2")
    cache = decoder.new_cache()
    decoder.forward(Batch.of([random_ids(decoder, 128)]), [cache])
    with pytest.raises(ValueError, match="129 tokens, but the model has 128 positions"):
        decoder.forward(Batch.of([[1]], [128]), [cache])
    assert cache.length == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "float16"}, "dtype"), ({"numerics": "exact"}, "numerics"), ({"backend": "cuda"}, "backend 'cuda'")],
)
def test_unknown_options_are_refused(odd_decoder, options, message):
    """An unknown dtype or numerics mode raises ValueError naming it, an unknown backend ConfigError."""
    with pytest.raises((ValueError, ConfigError), match=message):
        odd_decoder(**options)
