"""Adapters: whoever has one gets the model with its matrices changed, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Adapter, Array, Batch, LowRank
from treadle_plugin_api.decoder_config import DecoderConfig, MoeConfig
from treadle_server.model.adapters import adaptable
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays

MakeAdapter = Callable[..., Adapter]

FAMILIES = [
    "gpt2",
    "gpt_neox",
    "phi3",
    "gemma2",
    "falcon_new",
    "cohere",
    "mixtral",
    "qwen2_moe",
    "opt_projected",
    "olmo2",
]


def logits(decoder: Decoder, batch: Batch) -> Array:
    """Return `[tokens, vocab]` of whole sequences."""
    return decoder.head(decoder.forward(batch))


@pytest.fixture(scope="session")
def mixture_config(odd_config: DecoderConfig) -> DecoderConfig:
    """The odd sizes, experts in the first layer."""
    moe = MoeConfig(num_experts=5, top_k=2, hidden_dim=77, shared_dim=51, shared_gate=True, layers=(True, False))
    return replace(odd_config, moe=moe)


@pytest.mark.parametrize("model", FAMILIES)
def test_an_adapter_gives_the_logits_of_the_model_with_its_changes_merged(read_arrays, merge, make_adapter, model):
    """Rows with one adapter, with another, and with none, side by side, each equal the model merged with their own."""
    config, arrays = read_arrays(model)
    adapters = [make_adapter(config, seed=1), None, make_adapter(config, seed=2, rank=5), make_adapter(config, seed=3)]
    adapters[3] = adapters[0]
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, config.vocab_size, length) for length in (7, 1, 12, 3)]
    batch = Batch.of(sequences, adapters=adapters)
    found = logits(Decoder(config, Params.from_arrays(arrays), dtype="float64"), batch)
    for number, adapter in enumerate(adapters):
        expected = logits(Decoder(config, merge(arrays, adapter), dtype="float64"), Batch.of([sequences[number]]))
        rows = slice(batch.starts[number], batch.starts[number + 1])
        np.testing.assert_allclose(found[rows], expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_every_matrix_of_a_layer_but_the_routers_can_be_changed(mixture_config):
    """Projections and feed-forwards, experts' included; no embedding, head, router, gate, norm or bias."""
    of_layer = {name.removeprefix("layers.1.") for name in adaptable(mixture_config) if name.startswith("layers.1.")}
    assert of_layer == {f"attention.{one}.weight" for one in "qkvo"} | {
        f"mlp.{n}.weight" for n in ("gate", "up", "down")
    }
    of_experts = {name for name in adaptable(mixture_config) if name.startswith("layers.0.mlp.")}
    assert len(of_experts) == 6 * 3  # five experts and the shared one
    assert adaptable(mixture_config)["layers.0.mlp.experts.4.down.weight"] == (150, 77)


def pieces(draw_sizes: list[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield where a sequence's pieces start and stop."""
    start = 0
    for size in [*draw_sizes, length]:
        stop = min(start + size, length)
        if stop > start:
            yield start, stop
        start = stop


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), max_size=4), mates=st.lists(st.integers(0, 2), max_size=5), data=st.data())
def test_a_row_of_a_mixed_batch_is_the_row_alone(mixture_config, make_adapter, numerics, sizes, mates, data):
    """Whatever adapters are beside it and however its prompt is cut; to the bit in reproducible mode."""
    params = Params.from_arrays(random_arrays(mixture_config, seed=3, scale=0.1))
    decoder = Decoder(mixture_config, params, numerics=numerics)
    adapters = [None, *(make_adapter(mixture_config, "float32", seed, rank=seed) for seed in (1, 5))]
    rng = np.random.default_rng(4)
    ids, own = rng.integers(0, 523, 40), adapters[data.draw(st.integers(0, 2))]
    alone = logits(decoder, Batch.of([ids], adapters=[own]))
    place, cache, rows = data.draw(st.integers(0, len(mates))), decoder.new_cache(), []
    for start, stop in pieces(sizes, len(ids)):
        others = [rng.integers(0, 523, data.draw(st.integers(1, 20))) for _ in mates]
        sequences = [*others[:place], ids[start:stop], *others[place:]]
        caches = [cache if number == place else decoder.new_cache() for number in range(len(sequences))]
        of_mates = [adapters[mate] for mate in mates]
        batch = Batch.of(
            sequences, [one.length for one in caches], adapters=[*of_mates[:place], own, *of_mates[place:]]
        )
        rows.append(decoder.head(decoder.forward(batch, caches))[batch.starts[place] : batch.starts[place + 1]])
    found = np.concatenate(rows)
    if numerics == "reproducible":
        assert found.tobytes() == alone.tobytes()
    else:
        np.testing.assert_allclose(found, alone, rtol=0, atol=2e-4)


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), max_size=6))
def test_cached_decoding_with_an_adapter_equals_one_pass(odd_config, make_adapter, sizes):
    """Chunks and single steps through a cache, in float64."""
    params = Params.from_arrays(random_arrays(odd_config, seed=3, scale=0.1))
    decoder, adapter = Decoder(odd_config, params, dtype="float64"), make_adapter(odd_config)
    ids, cache, rows = np.random.default_rng(1).integers(0, 523, 50), decoder.new_cache(), []
    for start, stop in pieces(sizes, len(ids)):
        rows.append(decoder.forward(Batch.of([ids[start:stop]], [start], adapters=[adapter]), [cache]))
    whole = decoder.forward(Batch.of([ids], adapters=[adapter]))
    np.testing.assert_allclose(np.concatenate(rows), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "a", "b", "message"),
    [
        ("embedding.weight", (2, 150), (523, 2), "embedding.weight, which is no matrix that an adapter can change"),
        ("layers.2.attention.q.weight", (2, 150), (156, 2), "layers.2.attention.q.weight, which is no matrix"),
        ("layers.0.attention.q.weight", (2, 151), (156, 2), r"a \[rank, 150\] and b \[156, rank\], but has a \[2, 151"),
        ("layers.0.attention.k.weight", (2, 150), (52, 3), r"b \[52, 3\]"),
        ("layers.0.attention.k.weight", (0, 150), (52, 0), r"a \[0, 150\]"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(odd_decoder, name, a, b, message):
    """The parameter is named, and what it needs."""
    adapter = Adapter("mine", {name: LowRank(np.zeros(a, np.float32), np.zeros(b, np.float32), 1.0)})
    with pytest.raises(ValueError, match=f"adapter 'mine'.*{message}"):
        odd_decoder().forward(Batch.of([[1]], adapters=[adapter]))


def test_an_adapter_of_another_dtype_is_refused(odd_decoder, make_adapter, odd_config):
    """Silent casts would cost time in every step."""
    with pytest.raises(ValueError, match="must be float32, but is float64"):
        odd_decoder().forward(Batch.of([[1]], adapters=[make_adapter(odd_config)]))


def test_a_batch_needs_an_adapter_or_none_for_each_sequence(odd_decoder, make_adapter, odd_config):
    """Too few are refused."""
    batch = replace(Batch.of([[1], [2]]), adapters=(make_adapter(odd_config, "float32"),))
    with pytest.raises(ValueError, match="2 sequences has 1 adapters"):
        odd_decoder().forward(batch)


def test_sequences_without_adapters_make_a_batch_without():
    """So that nobody pays for a list of Nones."""
    assert Batch.of([[1], [2]], adapters=[None, None]).adapters is None
