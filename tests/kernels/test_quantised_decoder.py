"""Whole decoders of quantised weights: their twin's numbers, the same bits in any batch, and how well they predict."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import treadle_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Adapter, Batch, LowRank
from treadle_server import LanguageModel
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.checkpoints.quantising import quantise, save_quantised
from treadle_server.model.adapters import adaptable
from treadle_server.model.decoder import Decoder
from treadle_server.model.prepared import prepare_decoder
from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend
from treadle_server.tokenizer import Tokenizer

FORMATS = ["int8", "int4"]
MODELS = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "golden" / "parity").glob("*.npz")))
STORIES = treadle_weights.folder("stories")
NUM_STORIES = 60
# What perplexity may grow by, as a part of that of the model's own numbers.
GROWTH = {"int8": 0.005, "int4": 0.05}


class Rounded(np.ndarray):
    """A matrix that was quantised, widened."""


class RoundingBackend(ReproducibleNumpyBackend):
    """NumPy's backend, which rounds activations, keys and values as the kernels do: the twin of a quantised decoder."""

    def prepare(self, config, params):
        """Read matrices widened, those that are quantised as `Rounded`."""
        return prepare_decoder(config, params, self.dtype, self._read)

    def _read(self, weights):
        rows = np.empty((sum(one.shape[0] for one in weights), weights[0].shape[1]), np.float32)
        for one, part in zip(weights, np.split(rows, np.cumsum([one.shape[0] for one in weights])[:-1]), strict=True):
            one.read_into(part)
        return rows.view(Rounded) if weights[0].dtype in FORMATS else rows

    def cache_dtype(self, prepared):
        """Return bfloat16 where the kernels keep keys and values so."""
        from treadle_kernels.fused_forward import _plain

        return np.dtype(ml_dtypes.bfloat16) if _plain(prepared.config) else self.dtype

    def attention(self, q, keys, values, length, scoring, out, observe):
        """Attend with queries that are rounded as keys are."""
        super().attention(q.astype(keys.dtype).astype(self.dtype), keys, values, length, scoring, out, observe)

    def linear(self, x, linear, out):
        """Multiply with x, or with what rounding leaves of it."""
        if isinstance(linear.weight, Rounded):
            groups = -(-x.shape[-1] // 32)
            padded = np.zeros((len(x), groups * 32), np.float32)
            padded[:, : x.shape[-1]] = x
            parts = padded.reshape(len(x), groups, 32)
            largest = np.abs(parts).max(axis=2, keepdims=True)
            inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            rounded = np.rint(parts * inverse) * (largest * np.float32(1 / 127))
            x = rounded.reshape(len(x), -1)[:, : x.shape[-1]]
        return super().linear(np.ascontiguousarray(x), linear, out)


@pytest.fixture(scope="module")
def odd_decoder(kernels, odd_config, odd_params):
    """The odd decoder, quantised, on the compiled backend or on NumPy's."""

    @functools.cache
    def load(dtype: str, backend=None, **changes) -> Decoder:
        config = replace(odd_config, **changes)
        params = quantise(Path("odd"), config, odd_params("bfloat16", config), dtype)
        return Decoder(config, params, backend=backend or kernels)

    return load


def distance(ours: Decoder, twin: Decoder, ids: np.ndarray) -> float:
    """Return the mean distance of logits, in units of their spread."""
    logits = [one.head(one.forward(Batch.of([ids]))) for one in (ours, twin)]
    return float(np.sqrt(np.mean((logits[0] - logits[1]) ** 2)) / logits[1].std())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("tied_head", [True, False])
def test_odd_sizes_agree_with_the_twin(odd_decoder, dtype, tied_head):
    """Sizes that nothing divides, a head of its own or not: the logits of NumPy with rounded activations."""
    ours, twin = (odd_decoder(dtype, one, tied_head=tied_head) for one in (None, RoundingBackend()))
    assert ours._prepared.fused is not None
    assert distance(ours, twin, np.arange(20)) < 0.03


@pytest.mark.parametrize("name", MODELS)
def test_every_family_agrees_with_the_twin(kernels, golden, name):
    """Quantised models of every family, in one call or not, agree with NumPy with rounded activations."""
    with load_checkpoint(golden / "models" / name) as checkpoint:
        params = quantise(checkpoint.folder, checkpoint.config, checkpoint.params, "int8")
        ours, twin = (Decoder(checkpoint.config, params, backend=one) for one in (kernels, RoundingBackend()))
    assert (
        distance(ours, twin, np.load(golden / "parity" / f"{name}.npz")["ids_40"]) < 0.02
    )  # a number that is rounded otherwise shows


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=6, deadline=None)
@given(mates=st.lists(st.integers(1, 40), max_size=6), data=st.data())
def test_batch_mates_change_no_bit(odd_decoder, dtype, mates, data):
    """A decode step beside any mix of other steps and chunks gives the bits of the step alone."""
    decoder, rng = odd_decoder(dtype), np.random.default_rng(2)
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


@pytest.mark.parametrize("dtype", FORMATS)
def test_how_a_prompt_is_cut_changes_no_bit(odd_decoder, dtype):
    """A prompt in pieces through a cache has the bits of the whole one."""
    decoder, ids, rows, start = odd_decoder(dtype), np.arange(90) * 7 % 523, [], 0
    cache = decoder.new_cache()
    for piece in np.split(ids, [1, 5, 60]):
        rows.append(decoder.head(decoder.forward(Batch.of([piece], [start]), [cache])))
        start += len(piece)
    assert np.concatenate(rows).tobytes() == decoder.head(decoder.forward(Batch.of([ids]))).tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_number_of_threads_changes_no_bit(odd_decoder, dtype, kernels):
    """One thread, two and five give the same logits."""
    from treadle_kernels.backend import KernelBackend

    batch = Batch.of([np.arange(60), [4]])
    decoders = [odd_decoder(dtype, backend) for backend in (kernels, KernelBackend(1), KernelBackend(5))]
    assert len({one.head(one.forward(batch)).tobytes() for one in decoders}) == 1


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_saved_model_has_the_bits_of_one_rounded_at_load(kernels, golden, tmp_path, dtype):
    """Logits of a quantised folder are those of the model that is quantised when it is loaded."""
    source = golden / "models" / "qwen2"
    save_quantised(source, tmp_path / "q", dtype)
    batch, logits = Batch.of([np.arange(30)]), []
    with load_checkpoint(source) as plain, load_checkpoint(tmp_path / "q") as saved:
        for params in (quantise(source, plain.config, plain.params, dtype), saved.params):
            decoder = Decoder(plain.config, params, backend=kernels)
            logits.append(decoder.head(decoder.forward(batch)).tobytes())
    assert logits[0] == logits[1]


def test_a_neighbour_with_an_adapter_changes_no_bit(odd_decoder, odd_config):
    """Sequences with and without an adapter share a pass; the bare one has its own bits, the other the twin's."""
    rng, deltas = np.random.default_rng(5), {}
    for name, (rows, width) in adaptable(odd_config).items():
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, width), (rows, 3)))
        deltas[name] = LowRank(a, b, 0.1)
    adapter, ours, twin = Adapter("one", deltas), odd_decoder("int8"), odd_decoder("int8", RoundingBackend())
    batch = Batch.of([np.arange(9), [4, 5], [3]], adapters=[None, adapter, None])
    mixed = ours.forward(batch)
    bare = ours.forward(Batch.of([np.arange(9), [3]]))
    assert mixed[[*range(9), 11]].tobytes() == bare.tobytes()
    logits = [one.head(one.forward(Batch.of([[4, 5]], adapters=[adapter]))) for one in (ours, twin)]
    np.testing.assert_allclose(*logits, rtol=0, atol=0.05 * logits[1].std())


def test_new_weights_are_rounded_too(plugins, tiny_folder):
    """Weights that replace those of a running model are quantised as the first ones were."""
    texts = []
    with LanguageModel.load(tiny_folder, quantize="int4", plugins=plugins) as model:
        for _ in range(2):
            texts.append(model.generate("once", temperature=0, max_tokens=20, ignore_eos=True).choices[0].token_ids)
            assert model.decoder._prepared.layers[0].qkv.weight.stored == "int4"
            model.update_weights(tiny_folder)
    assert texts[0] == texts[1]


@functools.cache
def held_out(language: str) -> list[list[int]]:
    """Stories that the bundled model has not seen, as ids, each with its end."""
    sys.path.append(str(Path(__file__).parents[2] / "weights"))
    from stories.corpus import held_out_stories

    tokenizer = Tokenizer.load(STORIES)
    texts = held_out_stories(language, NUM_STORIES, num_training=56_000)
    return [[*tokenizer.encode(text), *tokenizer.eos_token_ids] for text in texts]


def perplexity(decoder: Decoder, language: str) -> float:
    """Return the perplexity of the held-out stories, begins not counted."""
    rows = held_out(language)
    hidden = decoder.forward(Batch.of(rows))
    logits = np.split(decoder.head(hidden).astype(np.float64), np.cumsum([len(row) for row in rows])[:-1])
    losses = []
    for row, own in zip(rows, logits, strict=True):
        shifted = own[:-1] - own[:-1].max(axis=1, keepdims=True)
        losses.append(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(row) - 1), row[1:]])
    return math.exp(np.concatenate(losses).mean())


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_rounding_costs_little_perplexity(kernels, language):
    """On unseen text the bundled model loses half a percent at most to eight bits, and five to four."""
    with load_checkpoint(STORIES) as checkpoint:
        config, params = checkpoint.config, checkpoint.params
        plain = perplexity(Decoder(config, params, backend=kernels), language)
        for dtype, growth in GROWTH.items():
            rounded = Decoder(config, quantise(STORIES, config, params, dtype), backend=kernels)
            assert perplexity(rounded, language) < plain * (1 + growth)
