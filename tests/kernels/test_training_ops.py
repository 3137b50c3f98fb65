"""Every compiled operation of training against its NumPy twin, over odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.loss import Targets
from treadle_server.model.attention import Scoring
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.model.prepared import Linear, Norm
from treadle_server.training import losses, optimizers

SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 1 << 30)
NUMPY = NumpyBackend()

some = settings(max_examples=40, deadline=None)


def draw(seed: int, *shape: int) -> Array:
    """Return float32 numbers of about 1."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(made: Array, expected: Array, tolerance: float = 2e-5) -> None:
    """Assert that arrays differ by no more than rounding does, beside the largest number."""
    assert made.shape == expected.shape
    assert np.abs(made - expected).max(initial=0) <= tolerance * max(1.0, np.abs(expected).max(initial=0))


@some
@given(st.integers(1, 130), st.integers(1, 1300), st.integers(1, 150), st.booleans(), st.booleans(), SEEDS)
def test_a_product_is_that_of_numpy_in_every_layout(training, rows, terms, columns, turned_a, turned_b, seed) -> None:
    """Rows or columns of either operand lie close, and what is there can be added to."""
    from treadle_kernels.training_backend import multiply

    a = draw(seed, terms, rows).T if turned_a else draw(seed, rows, terms)
    b = draw(seed + 1, columns, terms).T if turned_b else draw(seed + 1, terms, columns)
    there = draw(seed + 2, rows, columns)
    exact = a.astype(np.float64) @ b
    close(multiply(a, b, np.empty_like(there)), exact)
    close(multiply(a, b, there.copy(), is_added=True), exact + there)


@some
@given(SIZES, st.integers(1, 40), SEEDS)
def test_an_element_of_a_product_does_not_depend_on_the_other_rows(training, rows, columns, seed) -> None:
    """A row alone has the bits that it has among others."""
    from treadle_kernels.training_backend import multiply

    a, b = draw(seed, rows, 600), draw(seed, 600, columns)
    whole = multiply(a, b, np.empty((rows, columns), np.float32))
    assert np.array_equal(multiply(a[-1:], b, np.empty((1, columns), np.float32)), whole[-1:])


def test_products_of_part_of_an_array_and_of_nothing(training) -> None:
    """Strides are those of the array that is looked into; no rows and no terms are sums of nothing."""
    from treadle_kernels.training_backend import multiply

    wide, out = draw(0, 20, 90), np.zeros((20, 50), np.float32)
    multiply(wide[:, 3:33], draw(1, 30, 20), out[:, 7:27])
    close(out[:, 7:27], wide[:, 3:33] @ draw(1, 30, 20))
    assert not out[:, :7].any()
    assert not out[:, 27:].any()
    close(multiply(wide[::2, ::3], draw(2, 30, 5), np.empty((10, 5), np.float32)), wide[::2, ::3] @ draw(2, 30, 5))
    exact = draw(3, 6, 4).astype(np.float64)
    close(multiply(exact, draw(2, 4, 5), np.empty((6, 5), np.float32)), exact @ draw(2, 4, 5))
    assert multiply(draw(0, 0, 4), draw(0, 4, 3), np.empty((0, 3), np.float32)).shape == (0, 3)
    assert not multiply(draw(0, 3, 0), draw(0, 0, 2), np.empty((3, 2), np.float32)).any()


@some
@given(SIZES, SIZES, SEEDS)
def test_norms_and_their_gradients(training, odd_config: DecoderConfig, rows, dim, seed) -> None:
    """RMS norms are compiled; others, and those of heads, are NumPy's."""
    x, dy, norm = draw(seed, rows, dim), draw(seed + 1, rows, dim), Norm(draw(seed + 2, dim), None, {})
    close(training.norm(odd_config, x, norm, np.empty_like(x)), NUMPY.norm(odd_config, x, norm, np.empty_like(x)))
    made, expected = (one.norm_backward(odd_config, x, norm, dy) for one in (training, NUMPY))
    close(made[0], expected[0], 1e-4)
    close(made[1], expected[1], 1e-4)
    assert made[2] is expected[2] is None


def test_other_norms_are_left_to_numpy(training, odd_config: DecoderConfig) -> None:
    """LayerNorm, a norm without a scale, and one scale a head have the bits of NumPy."""
    x, dy = draw(0, 5, 3, 8), draw(1, 5, 3, 8)
    layer = replace(odd_config, norm=replace(odd_config.norm, kind="layer", bias=True))
    cases = (
        (layer, Norm(draw(2, 8), draw(3, 8), {})),
        (odd_config, Norm(None, None, {})),
        (odd_config, Norm(draw(2, 3, 8), None, {})),
    )
    for config, norm in cases:
        made, expected = (one.norm(config, x, norm, np.empty_like(x)) for one in (training, NUMPY))
        assert np.array_equal(made, expected)
        made, expected = (one.norm_backward(config, x, norm, dy)[0] for one in (training, NUMPY))
        assert np.array_equal(made, expected)


@some
@given(SIZES, st.integers(1, 5), st.integers(1, 40), st.integers(0, 9), st.booleans(), SEEDS)
def test_heads_turn_there_and_back(training, rows, heads, half, rest, interleaved, seed) -> None:
    """Halves against each other or neighbours, of part of a head or all of it."""
    angles = draw(seed, rows, half)
    cos, sin = np.cos(angles)[:, None, None], np.sin(angles)
    signed_sin = np.stack([-sin, sin], axis=1)[:, None]
    for name in ("rotary", "rotary_backward"):
        results = []
        for one in (training, NUMPY):
            x = draw(seed + 1, rows, heads, 2 * half + rest)
            turning = x[..., : 2 * half]
            pairs = turning.reshape(rows, heads, half, 2).swapaxes(2, 3) if interleaved else None
            getattr(one, name)(turning.reshape(rows, heads, 2, half) if pairs is None else pairs, cos, signed_sin)
            results.append(x)
        close(*results)


@some
@given(SIZES, SIZES, SEEDS)
def test_gated_silu_and_its_gradient(training, odd_config: DecoderConfig, rows, hidden, seed) -> None:
    """What the backward pass works out again is what the forward pass made, bit for bit."""
    up, dhidden = draw(seed, rows, 2 * hidden) * 8, draw(seed + 1, rows, hidden)
    made = training.activation(odd_config, up.copy())
    close(made, NUMPY.activation(odd_config, up.copy()))
    results = []
    for one in (training, NUMPY):
        again, slopes = one.activation_again(odd_config, up.copy())
        results.append(one.activation_backward(odd_config, slopes, dhidden))
        if one is training:
            assert np.array_equal(again, made)
    close(*results)


def attended(one: NumpyBackend, config: DecoderConfig, scoring: Scoring, lengths: list[int], seed: int) -> list[Array]:
    """Return what whole sequences' heads make, and the gradient of queries, keys and values."""
    from treadle_plugin_api.backend import Batch
    from treadle_server.model.kv_cache import ScratchCache
    from treadle_server.model.params import Params, random_arrays
    from treadle_server.model.pass_state import Pass

    batch = Batch.of([np.zeros(length, np.int64) for length in lengths])
    prepared = one.prepare(config, Params.from_arrays(random_arrays(config, seed=0)))
    caches = [ScratchCache(config, np.float32, length) for length in lengths]
    tables = [(np.ones((1, 1, 1, 1), np.float32),) * 2 for _ in prepared.rotaries]
    run = Pass.of(prepared, batch, caches, np.zeros((batch.num_tokens, config.dim), np.float32), tables)
    run.qkv[...] = draw(seed, *run.qkv.shape)
    one._attend_each(run, 0, scoring, None)
    qkv = run.qkv.reshape(batch.num_tokens, -1, config.attention.head_dim)
    dheads = draw(seed + 1, *run.heads.shape)
    heads = run.heads
    return [heads, one.attention_backward(config.attention, scoring, batch.starts, qkv, heads, dheads)]


@some
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 37), st.lists(SIZES, min_size=1, max_size=3),
    st.sampled_from([None, 1, 7, 40]), SEEDS,
)  # fmt: skip
def test_attention_and_its_gradient(training, odd_config, kv_heads, group, half, lengths, window, seed) -> None:
    """Grouped heads, windows and sequences of any length."""
    head_dim = 2 * half
    sizes = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    config = replace(odd_config, num_layers=1, attention=replace(odd_config.attention, **sizes))
    scoring = Scoring(head_dim**-0.5, window)
    for made, expected in zip(
        *(attended(one, config, scoring, lengths, seed) for one in (training, NUMPY)), strict=True
    ):
        close(made, expected)


def test_capped_scores_are_left_to_numpy(training, odd_config: DecoderConfig) -> None:
    """They have NumPy's bits."""
    scoring = Scoring(0.2, softcap=20.0)
    made, expected = (attended(one, odd_config, scoring, [9, 4], 0) for one in (training, NUMPY))
    assert all(np.array_equal(*pair) for pair in zip(made, expected, strict=True))


@some
@given(SIZES, st.integers(2, 90), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.01]), SEEDS)
def test_cross_entropy(training, rows, vocab, label_smoothing, z_loss, seed) -> None:
    """Losses, gradients and log-probabilities are those of the server's own."""
    rng = np.random.default_rng(seed)
    logits, targets = draw(seed, rows, vocab) * 5, Targets(rng.integers(0, vocab, rows), rng.random(rows))
    function = training.faster(losses.cross_entropy)
    assert function is not losses.cross_entropy
    made, expected = (
        one(logits.copy(), targets, label_smoothing=label_smoothing, z_loss=z_loss)
        for one in (function, losses.cross_entropy)
    )
    close(made.losses, expected.losses)
    close(made.dlogits, expected.dlogits)
    close(made.logprobs, expected.logprobs)


@pytest.mark.parametrize("place", [3, 40])
def test_what_is_not_a_number_is_not_lost(training, place: int) -> None:
    """One such logit makes the row's loss and gradient such, as NumPy does: training then stops and says so."""
    logits = draw(0, 2, 45)
    logits[1, place] = np.nan
    made = training.faster(losses.cross_entropy)(logits, Targets(np.array([1, 2]), np.ones(2)))
    assert np.isfinite(made.losses[0])
    assert not np.isfinite(made.losses[1])
    assert not np.isfinite(made.dlogits[1]).any()


@some
@given(st.integers(1, 100), st.integers(1, 9), SEEDS)
def test_adamw_has_numpys_bits(training, size, num_steps, seed) -> None:
    """So that a state made with one goes on with the other."""
    results = []
    for function in (training.faster(optimizers.adamw), optimizers.adamw):
        parameter, state = draw(seed, size), [np.zeros(size, np.float32) for _ in range(2)]
        for step in range(1, num_steps + 1):
            function(parameter, draw(seed + step, size), state, step, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
        results.append([parameter, *state])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


def test_other_functions_are_left_as_they_are(training) -> None:
    """Lion has no compiled twin, and a plugin's functions are its own."""

    def own(parameter: Array) -> None:
        """Do nothing."""

    functions: tuple[Callable[..., object], ...] = (optimizers.lion, losses.ppo, own)
    assert all(training.faster(function) is function for function in functions)


def test_a_linear_adds_its_bias(training) -> None:
    """The product's own gradient has none."""
    linear, x = Linear(draw(0, 7, 5), draw(1, 7)), draw(2, 3, 5)
    close(training.linear(x, linear, np.empty((3, 7), np.float32)), x @ linear.weight.T + linear.bias)
    close(training.linear_backward(linear, draw(3, 3, 7)), draw(3, 3, 7) @ linear.weight)
