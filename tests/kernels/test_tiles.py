"""The kernels between the products, each against its twin in NumPy."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

KEPT = ("float32", "bfloat16")


@functools.cache
def compiled():
    """Softmax, gate, mixing of values in float32 and in bfloat16, and rounding, as functions of arrays."""
    from numba import njit
    from treadle_kernels.attention import _mixer
    from treadle_kernels.step import _address
    from treadle_kernels.tiles import exp_row, largest_of_row, round_row, silu_gate

    @njit
    def softmax(x, scale):
        x /= exp_row(_address(x), len(x), scale, largest_of_row(_address(x), len(x)))

    @njit
    def gate(gates, ups, out):
        silu_gate(_address(gates), _address(ups), len(gates), _address(out))

    def mixing(kept):
        mix_rows = _mixer(kept)

        @njit
        def mix(weights, values, out):
            (rows, count), dim = weights.shape, values.shape[1]
            source = (_address(weights), weights.strides[0], rows, _address(values), values.strides[0])
            mix_rows(*source, count, dim, _address(out), out.strides[0], _address(values))

        return mix

    @njit
    def round_all(x, out):
        round_row(_address(x), len(x), _address(out))

    return softmax, gate, {kept: mixing(kept) for kept in KEPT}, round_all


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
@given(kept=st.sampled_from(KEPT), rows=st.integers(1, 9), count=st.integers(1, 50), dim=st.integers(1, 140))
def test_mixing_agrees_with_numpy(kernels, kept, rows, count, dim):
    """Weights times values is NumPy's product, whatever the width; each row has the bits it has alone."""
    rng = np.random.default_rng(rows * count * dim)
    weights, values = rng.random((rows, count), np.float32), rng.standard_normal((count, dim)).astype(kept)
    stored, wide = values.view(np.uint16) if kept == "bfloat16" else values, values.astype(np.float32)
    out, alone = np.full((rows, dim), np.nan, np.float32), np.empty((1, dim), np.float32)
    compiled()[2][kept](weights, stored, out)
    np.testing.assert_allclose(out, weights @ wide, rtol=1e-4, atol=1e-5 * count)
    compiled()[2][kept](weights[-1:].copy(), stored, alone)
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
@given(count=st.integers(1, 100), seed=st.integers(0, 1 << 30))
def test_rows_are_rounded_as_numpy_rounds(kernels, count, seed):
    """To the nearest bfloat16, of two to the even one, whatever the bits; nothing behind is written."""
    x = np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)
    x[::3] &= 0xFFFF8000  # halves, among them
    out = np.full(count + 3, 7, np.uint16)
    compiled()[3](x.view(np.float32), out)
    with np.errstate(invalid="ignore"):
        expected = x.view(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(out[:count].view(ml_dtypes.bfloat16).astype(np.float32), expected)
    assert (out[count:] == 7).all()


@functools.cache
def attend_in(kept):
    """Attention of some query rows, as a function of arrays."""
    from numba import njit
    from treadle_kernels.attention import attend_by, make_attend
    from treadle_kernels.step import _address

    made = make_attend(kept)
    attend_at = int(made.address)

    @njit
    def attend(position, window, scale, queries, keys, values, room):
        (rows, group, head_dim), place = queries.shape, _address(keys)
        what = position, rows, group, head_dim, window, _address(scale), _address(queries), queries.strides[0]
        attend_by(attend_at, (*what, place, _address(values), place, _address(room)))

    return attend, made


@settings(max_examples=60, deadline=None)
@given(
    kept=st.sampled_from(KEPT),
    rows=st.integers(1, 16),
    prefix=st.integers(0, 150),
    window=st.integers(1, 200),
    group=st.integers(1, 8),
    head_dim=st.integers(1, 100),
)
def test_attention_agrees_with_numpy(kernels, kept, rows, prefix, window, group, head_dim):
    """Any number of rows and keys, in windows, room behind them: NumPy's numbers, and the bits that a row has alone."""
    from treadle_kernels.attention import attend_floats

    rng, total = np.random.default_rng(rows * prefix + head_dim), prefix + rows
    queries = rng.standard_normal((rows, group, head_dim)).astype(np.float32)
    keys, values = (rng.standard_normal((total + 2, head_dim)).astype(kept) for _ in range(2))
    keys[total:] = values[total:] = np.nan
    stored = [one.view(np.uint16) if kept == "bfloat16" else one for one in (keys, values)]
    scale, size = np.array([head_dim**-0.5], np.float32), attend_floats(rows, group, head_dim, total)
    room = np.full(size + 5, 7, np.float32)
    attend_in(kept)[0](prefix, window, scale, queries, *stored, room)
    found = room[: queries.size].reshape(queries.shape)
    q, k, v = (one.astype(kept).astype(np.float64) for one in (queries, keys, values))
    for row in range(rows):
        seen = slice(max(0, prefix + row - window + 1), prefix + row + 1)
        weights = np.exp(np.einsum("gd,kd->gk", q[row], k[seen]) * scale[0])
        expected = weights @ v[seen] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=2e-5)
    assert (room[size:] == 7).all()
    alone = np.empty(attend_floats(1, group, head_dim, total), np.float32)
    attend_in(kept)[0](prefix + rows - 1, window, scale, queries[-1:].copy(), *stored, alone)
    assert alone[: group * head_dim].tobytes() == found[-1].tobytes()


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
