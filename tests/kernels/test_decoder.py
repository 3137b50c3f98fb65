"""Whole decoders on the compiled backend: NumPy's numbers, the same bits in any batch, and every family's reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Adapter, Batch, LowRank
from treadle_plugin_api.decoder_config import PositionsConfig
from treadle_server import LanguageModel
from treadle_server.model.adapters import adaptable
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays

MODELS = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "golden" / "parity").glob("*.npz")))
FORMATS = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def odd_decoder(kernels, odd_config, odd_params):
    """The odd decoder in a stored format, on the compiled backend or on NumPy's."""
    return lambda stored="bfloat16", backend=kernels: Decoder(odd_config, odd_params(stored), backend=backend)


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_reference(load_decoder, golden, name):
    """Every family's logits are within 1e-4 of the reference, in one pass."""
    expected = np.load(golden / "parity" / f"{name}.npz")
    for length in (1, 5, 40):
        decoder = load_decoder(name)
        logits = decoder.head(decoder.forward(Batch.of([expected[f"ids_{length}"]])))
        np.testing.assert_allclose(logits, expected[f"logits_{length}"], rtol=0, atol=1e-4)


DECODED = ["llama_plain", "llama_mqa_bf16", "llama_rope_dynamic", "mistral_sw8", "gemma3", "mixtral"]


@pytest.mark.parametrize("name", DECODED)
def test_greedy_tokens_agree_with_the_reference(load_decoder, golden, name):
    """Tokens decoded one at a time through a cache are the reference's."""
    expected = np.load(golden / "parity" / f"{name}.npz")
    decoder = load_decoder(name)
    cache, ids, chosen = decoder.new_cache(), expected["ids_5"], []
    for _ in range(len(expected["greedy_cached_ids"])):
        hidden = decoder.forward(Batch.of([ids], [cache.length], [len(expected["ids_5"])]), [cache])
        chosen.append(int(decoder.head(hidden[-1:])[0].argmax()))
        ids = [chosen[-1]]
    assert chosen == expected["greedy_cached_ids"].tolist()


@pytest.mark.parametrize(
    ("names", "fused"),
    [
        (["llama_plain", "llama_mqa_bf16", "mistral_sw8", "phi3", "qwen2", "qwen3"], True),
        (["gpt2", "gemma3", "mixtral", "olmo2", "gpt_neox"], False),
    ],
)
def test_the_common_kind_takes_one_call(load_decoder, names, fused):
    """Decoders of the common kind run in the compiled step; the others say that they do not fit."""
    assert {name: load_decoder(name)._prepared.fused is not None for name in names} == dict.fromkeys(names, fused)


@pytest.mark.parametrize("stored", FORMATS)
def test_odd_sizes_agree_with_numpy(odd_decoder, stored):
    """Sizes that nothing divides, in every stored format, give NumPy's logits."""
    batch = Batch.of([np.arange(100) % 523, [3], np.arange(30)])
    logits = [one.head(one.forward(batch)) for one in (odd_decoder(stored), odd_decoder(stored, "numpy"))]
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", ["window", "bias", "partial", "none"])
def test_what_the_step_can_do_agrees_with_numpy(kernels, odd_config, change):
    """Windows, biases, rotation of a part of a head or of nothing: NumPy's logits."""
    config = {
        "window": replace(odd_config, attention=replace(odd_config.attention, windows=(7, None))),
        "bias": replace(
            odd_config,
            attention=replace(odd_config.attention, qkv_bias=True, out_bias=True),
            mlp=replace(odd_config.mlp, bias=True),
        ),
        "partial": replace(
            odd_config,
            positions=replace(odd_config.positions, rotary=replace(odd_config.positions.rotary, dim=12)),
        ),
        "none": replace(odd_config, positions=PositionsConfig(kind="none")),
    }[change]
    params = Params.from_arrays(random_arrays(config, seed=4, scale=0.1))
    decoders = (Decoder(config, params, backend=kernels), Decoder(config, params))
    assert decoders[0]._prepared.fused is not None
    batch = Batch.of([np.arange(50), np.arange(9)])
    np.testing.assert_allclose(*[one.head(one.forward(batch)) for one in decoders], rtol=0, atol=2e-5)


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 90), max_size=5))
def test_chunking_changes_no_bit(odd_decoder, sizes):
    """Any cut of a 150-token prompt gives the bits of one pass."""
    decoder, ids = odd_decoder(), np.random.default_rng(1).integers(0, 523, 150)
    cache, rows, start = decoder.new_cache(), [], 0
    for size in [*sizes, len(ids)]:
        piece = ids[start : start + size]
        if len(piece):
            rows.append(decoder.head(decoder.forward(Batch.of([piece], [start]), [cache])))
            start += len(piece)
    assert np.concatenate(rows).tobytes() == decoder.head(decoder.forward(Batch.of([ids]))).tobytes()


@settings(max_examples=8, deadline=None)
@given(mates=st.lists(st.integers(1, 40), max_size=6), data=st.data())
def test_batch_mates_change_no_bit(odd_decoder, mates, data):
    """A decode step beside any mix of other steps and chunks gives the bits of the step alone."""
    decoder, rng = odd_decoder(), np.random.default_rng(2)
    place = data.draw(st.integers(0, len(mates)))
    cache = decoder.new_cache()
    decoder.forward(Batch.of([rng.integers(0, 523, 70)]), [cache])
    alone = decoder.head(decoder.forward(Batch.of([[7]], [70]), [cache.fork()]))
    sequences = [rng.integers(0, 523, length) for length in mates]
    sequences.insert(place, np.array([7]))
    caches = [decoder.new_cache() for _ in sequences]
    caches[place] = cache.fork()
    batch = Batch.of(sequences, [one.length for one in caches])
    hidden = decoder.forward(batch, caches)
    assert decoder.head(hidden)[int(batch.starts[place])].tobytes() == alone[0].tobytes()


def test_the_number_of_threads_changes_no_bit(odd_decoder, kernels):
    """One thread, two and five give the same logits."""
    from treadle_kernels.backend import KernelBackend

    batch = Batch.of([np.arange(60), [4]])
    decoders = [odd_decoder("bfloat16", backend) for backend in (kernels, KernelBackend(1), KernelBackend(5))]
    assert len({one.head(one.forward(batch)).tobytes() for one in decoders}) == 1


def test_a_neighbour_with_an_adapter_changes_no_bit(odd_decoder, odd_config):
    """Sequences with and without an adapter share a pass; the bare one has its own bits, the other NumPy's numbers."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    shapes = adaptable(odd_config)
    adapter = Adapter("one", {name: LowRank(draw(3, n), draw(m, 3), 0.1) for name, (m, n) in shapes.items()})
    batch = Batch.of([np.arange(9), np.arange(20), [3]], adapters=[None, adapter, None])
    ours, numpys = odd_decoder(), odd_decoder("bfloat16", "numpy")
    mixed = ours.forward(batch)
    bare = ours.forward(Batch.of([np.arange(9), [3]]))
    assert mixed[[*range(9), 29]].tobytes() == bare.tobytes()
    np.testing.assert_allclose(ours.head(mixed), numpys.head(numpys.forward(batch)), rtol=0, atol=1e-4)


def test_an_observed_pass_shows_what_numpy_shows(odd_decoder):
    """With an observer NumPy's pass runs, over compiled products, and every intermediate agrees."""
    seen: list[dict[str, np.ndarray]] = [{}, {}]
    for found, decoder in zip(seen, (odd_decoder(), odd_decoder("bfloat16", "numpy")), strict=True):
        decoder.forward(Batch.of([np.arange(12)]), observe=found.__setitem__)
    assert seen[0].keys() == seen[1].keys()
    for name, array in seen[0].items():
        np.testing.assert_allclose(array, seen[1][name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_weights_stay_as_they_are_stored(load_decoder):
    """A bfloat16 file is multiplied with where it is mapped: no copy, no widening."""
    layer = load_decoder("llama_mqa_bf16")._prepared.layers[0]
    for piece in (*layer.qkv.weight.pieces, *layer.mlp.up.weight.pieces):
        assert piece.dtype == np.uint16
        assert not piece.flags.owndata
        assert not piece.flags.writeable


def test_a_language_model_generates_on_it(plugins, tiny_folder):
    """Chosen by name through the plugin's door, it generates greedily what NumPy's backend generates."""
    results = []
    for backend in ("kernels", "numpy"):
        with LanguageModel.load(tiny_folder, backend=backend, plugins=plugins) as model:
            results.append(model.generate("once", temperature=0, max_tokens=20, ignore_eos=True).choices[0].token_ids)
    assert results[0] == results[1]


def test_steps_on_many_threads_keep_their_bits(odd_decoder):
    """A hundred decoding steps on more threads than there are CPUs give the bits of one thread."""
    from treadle_kernels.backend import KernelBackend

    logits = []
    for num_threads in (1, 7):
        decoder = odd_decoder("bfloat16", KernelBackend(num_threads))
        caches = [decoder.new_cache() for _ in range(3)]
        steps = (decoder.forward(Batch.of([[step], [7], [step * 2]], [step] * 3), caches) for step in range(100))
        logits.append(np.concatenate([decoder.head(hidden) for hidden in steps]).tobytes())
    assert logits[0] == logits[1]


def test_long_prompts_have_the_bits_of_their_pieces(kernels, odd_config):
    """2,500 tokens in one pass without a cache, and in pieces through one."""
    config = replace(odd_config, context_length=4000)
    decoder = Decoder(config, Params.from_arrays(random_arrays(config, seed=4, scale=0.1)), backend=kernels)
    ids, cache = np.arange(2500) % 523, decoder.new_cache()
    whole = decoder.forward(Batch.of([ids]))
    pieces = [decoder.forward(Batch.of([part], [cache.length]), [cache]) for part in np.split(ids, [2000, 2499])]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


def test_a_pass_that_is_too_long_is_told(kernels, odd_config, odd_params):
    """More tokens than an operation has chunks for are refused; the error says how many, and what to do."""
    decoder = Decoder(odd_config, odd_params("float32"), backend=kernels)
    with pytest.raises(ValueError, match="a pass of 3000000 tokens is too long"):
        decoder._prepared.fused._check(3_000_000)
