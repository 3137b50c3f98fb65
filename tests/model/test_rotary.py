"""Rotary angles of every kind, and the turn, against hand values and defining properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_plugin_api.decoder_config import PositionsConfig, RotaryConfig
from treadle_server.model.rotary import Rotary, angle_key, rotary_forward, rotary_frequencies, rotary_table


def rotate(x: np.ndarray, positions: list[int], frequencies: np.ndarray) -> np.ndarray:
    """Apply rotary_forward to x `[rows, head_dim]` as one head."""
    cos, sin = rotary_table(frequencies, np.array(positions), np.float64)
    return rotary_forward(x.reshape(len(x), 1, 2, -1), cos, sin).reshape(x.shape)


def test_rotary_pairs_halves():
    """At a quarter turn (a, b, c, d) becomes (-c, -d, a, b): entry i is paired with i + half."""
    quarter = np.full(2, math.pi / 2)
    result = rotate(np.array([[1.0, 2.0, 3.0, 4.0]]), [1], quarter)
    np.testing.assert_allclose(result, [[-3.0, -4.0, 1.0, 2.0]], atol=1e-12)


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        (RotaryConfig(interleaved=True), [-2.0, 1.0, -4.0, 3.0, -6.0, 5.0]),
        (RotaryConfig(dim=4), [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]),
        (RotaryConfig(dim=4, interleaved=True), [-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]),
        (RotaryConfig(dim=2), [-2.0, 1.0, 3.0, 4.0, 5.0, 6.0]),
    ],
)
def test_which_dimensions_turn_together(rotary, expected):
    """Neighbours when interleaved; only the leading ones when a part of the head turns. Pairs are a view."""
    x = np.array([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    pairs = Rotary.of(rotary, 6).pairs(x)
    cos, sin = rotary_table(np.full(pairs.shape[-1], math.pi / 2), np.array([1]), np.float64)
    rotary_forward(pairs, cos, sin, out=pairs)
    np.testing.assert_allclose(x[0, 0], expected, atol=1e-12)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_rotary_scores_depend_on_distance_only(first, second, shift):
    """Norms are kept, and the product of a query and a key is the same when both move."""
    rng = np.random.default_rng(first)
    q, k = rng.standard_normal((2, 1, 8))
    frequencies = rotary_frequencies(RotaryConfig(), 8)
    np.testing.assert_allclose(np.linalg.norm(rotate(q, [first], frequencies)), np.linalg.norm(q))
    near = rotate(q, [first], frequencies) @ rotate(k, [second], frequencies).T
    far = rotate(q, [first + shift], frequencies) @ rotate(k, [second + shift], frequencies).T
    np.testing.assert_allclose(near, far, atol=1e-9)


def test_frequencies_by_hand():
    """The frequencies of 4 dimensions with theta 100 are 1 and 1/10; linear scaling divides them."""
    np.testing.assert_allclose(rotary_frequencies(RotaryConfig(theta=100.0), 4), [1, 0.1])
    linear = RotaryConfig(kind="linear", theta=100.0, factor=2.0)
    np.testing.assert_allclose(rotary_frequencies(linear, 4), [0.5, 0.05])


def test_llama3_frequencies_by_hand():
    """Fast pairs are kept, slow ones divided by the factor, and half-way ones get half of each."""
    base = np.array([1.0, 0.1, 0.01])  # of 6 dimensions
    kept = {"original_context_length": 10**6}
    stretched = {"original_context_length": 1}
    for more, factor in ((kept, 1), (stretched, 8)):
        rotary = RotaryConfig(kind="llama3", theta=1000.0, factor=8.0, **more)
        np.testing.assert_allclose(rotary_frequencies(rotary, 6), base / factor)
    context = round(2 * 2 * math.pi / 0.001)  # the slowest pair of theta 1e6 turns twice
    rotary = RotaryConfig(
        kind="llama3", theta=1e6, factor=8.0, low_freq_factor=1, high_freq_factor=3, original_context_length=context
    )
    slow = rotary_frequencies(rotary, 4)[1]
    assert slow == pytest.approx(0.001 * (1 + 1 / 8) / 2, rel=1e-3)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    """The first pair is left alone, the last is divided by the factor, and none leaves that range."""
    rotary = RotaryConfig(kind="yarn", theta=10000.0, factor=4.0, original_context_length=2048)
    ratio = rotary_frequencies(RotaryConfig(), 64) / rotary_frequencies(rotary, 64)
    assert (ratio[0], ratio[-1]) == (pytest.approx(1), pytest.approx(4))
    assert (np.diff(ratio) >= -1e-12).all()


def test_dynamic_theta_grows_past_the_context():
    """Within the original context nothing changes; at twice its length theta has grown by (factor + 1)^(d/(d-2))."""
    rotary = RotaryConfig(kind="dynamic", theta=100.0, factor=3.0, original_context_length=10)
    rows = rotary_frequencies(rotary, 6, np.array([4, 10, 20]))
    plain = rotary_frequencies(RotaryConfig(theta=100.0), 6)
    np.testing.assert_allclose(rows[:2], [plain, plain])
    np.testing.assert_allclose(rows[2], rotary_frequencies(RotaryConfig(theta=100.0 * 4 ** (6 / 4)), 6))


def test_longrope_changes_factors_past_the_context():
    """A length up to the original context takes the short factors, a longer one the long ones."""
    rotary = RotaryConfig(
        kind="longrope", theta=100.0, original_context_length=10, short_factors=(1.0, 2.0), long_factors=(4.0, 5.0)
    )
    rows = rotary_frequencies(rotary, 4, np.array([10, 11]))
    np.testing.assert_allclose(rows, [[1, 0.1 / 2], [1 / 4, 0.1 / 5]])


@given(st.sampled_from(["default", "dynamic", "longrope"]), st.integers(1, 40), st.integers(1, 40))
def test_lengths_of_one_angle_key_have_the_same_angles(kind: str, one: int, other: int):
    """Equal keys, equal frequencies; and different ones, different frequencies."""
    rotary = RotaryConfig(
        kind=kind, factor=3.0, original_context_length=10, short_factors=(1.0, 2.0), long_factors=(4.0, 5.0)
    )
    positions = PositionsConfig(kind="rotary", rotary=rotary)
    same = np.array_equal(*(rotary_frequencies(rotary, 4, np.array([length])) for length in (one, other)))
    assert same == (angle_key(positions, one) == angle_key(positions, other))


def test_the_attention_factor_scales_the_turn():
    """Norms grow by the attention factor."""
    cos, sin = rotary_table(np.array([0.3]), np.array([5]), np.float64, 1.5)
    turned = rotary_forward(np.array([[[[3.0], [4.0]]]]), cos, sin)
    assert np.linalg.norm(turned) == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        (RotaryConfig(dim=3), "rotary dim must be even"),
        (RotaryConfig(dim=10), r"rotary dim must be between 2 and head_dim \(8\), but is 10"),
        (RotaryConfig(kind="dynamic", dim=2), "rotary dim must be over 2 for dynamic"),
        (RotaryConfig(kind="longrope", short_factors=(1.0,) * 4), "long_factors must be 4 numbers"),
    ],
)
def test_angles_that_do_not_fit_a_head_are_refused(rotary, message):
    """The error names the field, what fits, and the value."""
    with pytest.raises(ValueError, match=message):
        rotary.check_head_dim(8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_kept_angles_have_the_bits_of_new_ones(kind: str, dtype: type):
    """Before the last position that is kept, at it and behind it, one at a time or many."""
    rotary = Rotary.of(RotaryConfig(kind=kind, factor=4.0, attention_factor=1.25), 20)
    for positions in ([0], [7, 3, 2047], [2047], [2048], [5, 3000], list(range(100))):
        found = rotary.table(np.array(positions), np.array(positions) + 1, dtype)
        expected = rotary_table(rotary.frequencies, np.array(positions), dtype, 1.25)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
        assert [one.dtype for one in found] == [dtype, dtype]
