"""Keys and values in bfloat16, kept where activations are rounded: half the memory, the same bits however they came."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Batch
from treadle_server import LanguageModel
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays
from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class RoundingTwin(ReproducibleNumpyBackend):
    """NumPy's backend, which rounds to bfloat16 what the kernels do: activations, queries, keys and values."""

    def cache_dtype(self, prepared):
        """Return bfloat16."""
        return BFLOAT16

    def attention(self, q, keys, values, length, scoring, out, observe):
        """Attend with rounded queries."""
        super().attention(q.astype(BFLOAT16).astype(self.dtype), keys, values, length, scoring, out, observe)

    def linear(self, x, linear, out):
        """Multiply with rounded rows."""
        return super().linear(x.astype(BFLOAT16).astype(self.dtype), linear, out)


@pytest.fixture(scope="module")
def rounding(kernels):
    """The backend that rounds activations to bfloat16."""
    from treadle_kernels.backend import KernelBackend

    return KernelBackend(num_threads=2, rounded=True)


@pytest.fixture(scope="module")
def decoders(odd_config, odd_params, rounding):
    """The odd decoder by head size and number of heads that share keys: on the rounding backend, and on NumPy's."""

    def load(head_dim: int = 26, group: int = 5, backend=rounding, stored: str = "bfloat16") -> Decoder:
        heads = replace(odd_config.attention, head_dim=head_dim, num_heads=2 * group, scale=head_dim**-0.5)
        config = replace(odd_config, attention=heads)
        return Decoder(config, odd_params(stored, config), backend=backend)

    return load


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [2, 26, 32, 64, 80, 96])
def test_logits_are_those_of_the_twin(decoders, head_dim, group):
    """Heads of any size, shared by any number, of a prompt and of steps: but for numbers that are rounded otherwise."""
    ours, twin = decoders(head_dim, group), decoders(head_dim, group, RoundingTwin())
    assert ours.cache_dtype == BFLOAT16
    found = []
    for decoder in (ours, twin):
        cache, rows = decoder.new_cache(), []
        for piece in (np.arange(130) % 523, [7], [9], np.arange(5)):
            hidden = decoder.forward(Batch.of([piece], [cache.length]), [cache])
            rows.append(decoder.head(hidden))
        found.append(np.concatenate(rows))
    distance = np.sqrt(np.mean((found[0] - found[1]) ** 2)) / found[1].std()
    assert distance < 0.006
    exact = decoders(head_dim, group, "numpy")
    far = exact.head(exact.forward(Batch.of([np.arange(130) % 523]))) - found[1][:130]
    assert distance < np.sqrt(np.mean(far**2)) / found[1].std() / 2  # the twin is what it is near to


@settings(max_examples=15, deadline=None)
@given(
    head_dim=st.integers(1, 40).map(lambda half: 2 * half),
    group=st.integers(1, 7),
    sizes=st.lists(st.integers(1, 90), max_size=4),
    mates=st.lists(st.integers(1, 40), max_size=3),
)
def test_neither_cuts_nor_mates_change_a_bit(decoders, head_dim, group, sizes, mates):
    """A prompt in pieces beside others through a cache, and at once without one: the same bits."""
    decoder, ids = decoders(head_dim, group), np.random.default_rng(1).integers(0, 523, 150)
    caches = [decoder.new_cache() for _ in range(1 + len(mates))]
    rows = []
    for size in [*sizes, len(ids)]:
        piece = ids[caches[0].length : caches[0].length + size]
        if not len(piece):
            break
        batch = Batch.of([piece, *(np.arange(mate) for mate in mates)], [one.length for one in caches])
        rows.append(decoder.forward(batch, caches)[: len(piece)])
        for mate in caches[1:]:
            mate.truncate(0)
    assert np.concatenate(rows).tobytes() == decoder.forward(Batch.of([ids])).tobytes()


def test_what_is_kept_is_rounded_once(decoders):
    """Keys and values of the first layer are those of a decoder that rounds nothing but them, to the nearest."""
    ids = np.arange(20)
    ours, exact = decoders(stored="float32"), decoders(backend="numpy", stored="float32")
    assert ours.cache_dtype == np.float32  # matrices in float32 meet activations as they are
    rounded = decoders()
    caches = [decoder.new_cache() for decoder in (rounded, exact)]
    for decoder, cache in zip((rounded, exact), caches, strict=True):
        decoder.forward(Batch.of([ids]), [cache])
    kept, whole = (cache.copy_out(0, 20)[0].astype(np.float32) for cache in caches)
    np.testing.assert_allclose(kept, whole, rtol=0, atol=0.02 * np.abs(whole).max())


def test_numpy_reads_what_is_kept(decoders):
    """An observed pass goes on from a cache that the compiled step filled, and leaves one that it can go on from."""
    decoder, seen, logits = decoders(), {}, []
    for observe in (None, seen.__setitem__):
        cache, rows = decoder.new_cache(), []
        for piece, observer in ((np.arange(30), None), (np.arange(9), observe), ([5], None)):
            hidden = decoder.forward(Batch.of([piece], [cache.length]), [cache], observe=observer)
            rows.append(decoder.head(hidden))
        logits.append(np.concatenate(rows))
    assert seen
    distance = np.sqrt(np.mean((logits[0] - logits[1]) ** 2)) / logits[0].std()
    assert distance < 0.01  # NumPy's pass rounds queries and hidden layers at other places


def test_another_decoders_cache_is_refused(decoders):
    """Compiled code would read past the end of a cache of smaller numbers, or nonsense of larger ones."""
    rounded, plain = decoders(), decoders(stored="float32")
    for decoder, other in ((rounded, plain), (plain, rounded)):
        with pytest.raises(ValueError, match=r"a cache holds .*, but this decoder keeps keys and values in"):
            decoder.forward(Batch.of([[1]]), [other.new_cache()])


def test_families_that_numpy_attends_for_keep_float32(kernels, golden):
    """Only what runs in one compiled call reads bfloat16: NumPy would widen all of it for every token."""
    from treadle_server.checkpoints.loading import load_checkpoint
    from treadle_server.checkpoints.quantising import quantise

    for name, expected in (("qwen2", BFLOAT16), ("gpt2", np.float32), ("gemma3", np.float32)):
        with load_checkpoint(golden / "models" / name) as checkpoint:
            params = quantise(checkpoint.folder, checkpoint.config, checkpoint.params, "int8")
            assert Decoder(checkpoint.config, params, backend=kernels).cache_dtype == expected


def test_a_served_model_counts_half_the_memory(plugins, tiny_folder):
    """Requests, prefixes and limits are counted in the bytes that are there; answers continue from kept prefixes."""
    counted = []
    for options in ({}, {"quantize": "int8"}):
        with LanguageModel.load(tiny_folder, backend="kernels", plugins=plugins, **options) as model:
            answers = [
                model.generate("once " * 40, temperature=0, max_tokens=20, ignore_eos=True).choices[0].token_ids
                for _ in range(2)
            ]
            assert answers[0] == answers[1]
            assert model.engine.prefix_cache.num_hit_tokens > 0
            counted.append((model.engine.kv_bytes_for(100), model.engine.prefix_cache.num_bytes))
    assert counted[0] == tuple(2 * size for size in counted[1])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_sequence(rounding, odd_config, wrong):
    """A row of the embedding that is not finite spoils the logits of who uses it, and of nobody else."""
    arrays = random_arrays(odd_config, seed=3, scale=0.1)
    arrays["embedding.weight"][9] = wrong
    config = replace(odd_config, tied_head=False)
    arrays |= {name: one for name, one in random_arrays(config, seed=3, scale=0.1).items() if name.startswith("head")}
    params = Params.from_arrays({name: array.astype(BFLOAT16) for name, array in arrays.items()})
    decoder = Decoder(config, params, backend=rounding)
    caches = [decoder.new_cache() for _ in range(2)]
    hidden = decoder.forward(Batch.of([[1, 9, 2], [1, 4, 2]]), caches)
    assert np.isnan(hidden[1:3]).any(axis=1).all()
    assert np.isfinite(hidden[[0, 3, 4, 5]]).all()
    assert hidden[3:].tobytes() == decoder.forward(Batch.of([[1, 4, 2]])).tobytes()
