"""The kernels between the products, each against its twin in NumPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@functools.cache
def compiled():
    """Softmax, gate, mixing and transposing as functions of arrays."""
    from numba import njit
    from treadle_kernels.attention import _mix, _transpose
    from treadle_kernels.step import _address
    from treadle_kernels.tiles import exp_row, largest_of_row, silu_gate

    @njit
    def softmax(x, scale):
        x /= exp_row(_address(x), len(x), scale, largest_of_row(_address(x), len(x)))

    @njit
    def gate(gates, ups, out):
        silu_gate(_address(gates), _address(ups), len(gates), _address(out))

    @njit
    def mix(weights, values, out):
        (rows, count), dim = weights.shape, values.shape[1]
        source = (_address(weights), weights.strides[0], rows, _address(values), values.strides[0])
        _mix(*source, count, dim, _address(out), out.strides[0], _address(values))

    @njit
    def transpose(keys, turned):
        _transpose(_address(keys), len(keys), keys.shape[1], _address(turned), _address(keys))

    return softmax, gate, mix, transpose


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 100), spread=st.floats(0, 80), scale=st.floats(0.01, 2))
def test_softmax_agrees_with_numpy(kernels, count, spread, scale):
    """Scaled, shifted and divided as NumPy does; what lies behind stays as it was."""
    x = np.full(count + 3, 7, np.float32)
    x[:count] = spread * np.random.default_rng(count).standard_normal(count)
    scores = np.float64(np.float32(scale)) * x[:count].astype(np.float64)
    expected = np.exp(scores - scores.max())
    compiled()[0](x[:count], np.float32(scale))
    np.testing.assert_allclose(x[:count], expected / expected.sum(), rtol=1e-4, atol=1e-7)
    assert (x[count:] == 7).all()


def test_exp_is_exact_to_some_units_in_the_last_place(kernels):
    """Over the whole range of silu, up to its ends, no error is above a millionth part."""
    gates = np.concatenate([np.linspace(-87, 87, 4001), [0, -1e-30, 1e-30, -200, 200, 1e30]]).astype(np.float32)
    out = np.empty_like(gates)
    compiled()[1](gates, np.ones_like(gates), out)
    wide = gates.astype(np.float64)
    expected = wide / (1 + np.exp(np.clip(-wide, None, 700)))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-35)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), count=st.integers(1, 50), dim=st.integers(1, 140))
def test_mixing_agrees_with_numpy(kernels, rows, count, dim):
    """Weights times values is NumPy's product, whatever the width; each row has the bits it has alone."""
    rng = np.random.default_rng(rows * count * dim)
    weights, values = rng.random((rows, count), np.float32), rng.standard_normal((count, dim)).astype(np.float32)
    out, alone = np.full((rows, dim), np.nan, np.float32), np.empty((1, dim), np.float32)
    compiled()[2](weights, values, out)
    np.testing.assert_allclose(out, weights @ values, rtol=1e-4, atol=1e-5 * count)
    compiled()[2](weights[-1:].copy(), values, alone)
    assert alone[0].tobytes() == out[-1].tobytes()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_vectors_fold_alike_alone_and_together(kernels, count):
    """Sharing the work of folding changes no bit: columns of tiles of 1, 2 and 4 weights agree."""
    from numba import njit
    from treadle_kernels.step import _address
    from treadle_kernels.tiles import dot_strip

    @njit
    def dots(weight, x, out):
        matrix = (_address(weight), weight.strides[0], len(weight), _address(weight), 0)
        dot_strip(1, count, "float32", matrix, (_address(x), 0, len(x), _address(out), 0))

    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((8, 53)).astype(np.float32), rng.standard_normal(53).astype(np.float32)
    out, one = np.empty(8, np.float32), np.empty(1, np.float32)
    dots(weight, x, out)
    for row in range(8):
        dots(weight[row : row + 1], x, one)
        assert one[0] == out[row]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 64), head_dim=st.integers(1, 70))
def test_keys_are_turned_exactly(kernels, count, head_dim):
    """Whatever the sizes, a block of keys lies there turned, and nothing behind its room is written."""
    from treadle_kernels.attention import KEY_BLOCK, turned_floats

    keys = np.random.default_rng(count * head_dim).standard_normal((count, head_dim)).astype(np.float32)
    room = np.full(turned_floats(head_dim) + 16, 7, np.float32)
    compiled()[3](keys, room)
    turned = room[: head_dim * KEY_BLOCK].reshape(head_dim, KEY_BLOCK)
    assert (turned[:, :count] == keys.T).all()
    assert (room[-16:] == 7).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("count", "place"), [(1, 0), (40, 3), (40, 35)])
def test_what_is_not_finite_stays_so(kernels, wrong, count, place):
    """NaN, infinity, or nothing but minus infinity among scores: all weights are NaN, as they are in NumPy."""
    x = np.zeros(count, np.float32)
    x[place] = wrong
    if wrong == -np.inf:
        x[:] = wrong
    compiled()[0](x, np.float32(1))
    assert np.isnan(x).all()
