"""Each operation against hand values and its defining properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from treadle_server.model import ops

finite = st.floats(-30, 30, width=32)
matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=finite)


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_linear_multiplies_by_the_transpose_and_adds_the_bias(rows):
    """The result is x @ W.T + b for one row, few rows and many, with and without a buffer for the result."""
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((rows, 5)), rng.standard_normal((7, 5)), rng.standard_normal(7)
    expected = np.einsum("ri,oi->ro", x, weight) + bias
    out = np.empty((rows, 7))
    assert ops.linear_forward(x, weight, bias, out) is out
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_allclose(ops.linear_forward(x, weight), expected - bias, atol=1e-12)


def test_rms_norm_by_hand():
    """(3, 4) has the root mean square sqrt(12.5)."""
    result = ops.rms_norm_forward(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), eps=0.0)
    np.testing.assert_allclose(result, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]])


def test_layer_norm_by_hand():
    """(1, 3) has mean 2 and variance 1."""
    result = ops.layer_norm_forward(np.array([[1.0, 3.0]]), np.array([2.0, 2.0]), np.array([0.5, 0.0]), eps=0.0)
    np.testing.assert_allclose(result, [[-1.5, 2.0]])


@given(matrices)
def test_norms_in_place_equal_norms_into_a_new_array(x):
    """`out` may be `x`."""
    weight = np.linspace(0.5, 2, x.shape[1], dtype=np.float32)
    for norm in (
        lambda x, out=None: ops.rms_norm_forward(x, weight, 1e-5, out),
        lambda x, out=None: ops.layer_norm_forward(x, weight, weight, 1e-5, out),
    ):
        expected, copy = norm(x), x.copy()
        assert norm(copy, copy).tobytes() == expected.tobytes()


@given(matrices)
def test_layer_norm_ignores_a_shift(x):
    """Adding the same number to every entry of a row changes nothing beyond rounding."""
    ones = np.ones(x.shape[1])
    x = x.astype(np.float64)
    np.testing.assert_allclose(
        ops.layer_norm_forward(x + 7, ones, None, 1e-3), ops.layer_norm_forward(x, ones, None, 1e-3), atol=1e-9
    )


@given(matrices)
def test_softmax_rows_are_distributions_and_ignore_a_shift(x):
    """Rows sum to 1, and adding a number to a row changes nothing."""
    result = ops.softmax_forward(x.astype(np.float64))
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(ops.softmax_forward(x.astype(np.float64) + 100), result, atol=1e-12)


def test_softmax_by_hand():
    """Odds 1 : 3, a masked entry gets exactly 0, and large entries do not overflow."""
    result = ops.softmax_forward(np.array([[1000.0, 1000.0 + math.log(3), -np.inf]]))
    np.testing.assert_allclose(result, [[0.25, 0.75, 0.0]], atol=1e-12)
    assert result[0, 2] == 0


def test_sinusoidal_positions_by_hand():
    """PE(3) in 4 dimensions is sin 3, cos 3, sin 0.03, cos 0.03; an odd width drops the last cosine."""
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    np.testing.assert_allclose(ops.sinusoidal_positions(np.array([3]), 4, np.float64), [expected])
    assert ops.sinusoidal_positions(np.array([3, 4]), 5, np.float32).shape == (2, 5)


@given(arrays(np.float64, (1, 7), elements=st.floats(-1000, 1000)))
def test_activations_follow_their_formulas(x):
    """Every activation agrees with its definition, far from 0 too, in place or not."""
    formulas = {
        ops.gelu_forward: lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        ops.gelu_quick_forward: lambda v: v / (1 + math.exp(-max(1.702 * v, -700))),
        ops.relu_squared_forward: lambda v: max(v, 0.0) ** 2,
        ops.silu_forward: lambda v: v / (1 + math.exp(-max(v, -700))),
        ops.gelu_tanh_forward: lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        ops.relu_forward: lambda v: max(v, 0.0),
    }
    for function, formula in formulas.items():
        expected = [[formula(v) for v in x[0].tolist()]]
        np.testing.assert_allclose(function(x), expected, rtol=1e-12, atol=1e-12)
        copy = x.copy()
        assert function(copy, copy) is copy
        np.testing.assert_allclose(copy, expected, rtol=1e-12, atol=1e-12)


def test_activations_do_not_overflow_in_float32():
    """The ends of float32's range give 0 or the value itself, without a warning."""
    x = np.array([[-3e38, -200.0, 200.0]], np.float32)
    np.testing.assert_allclose(ops.silu_forward(x), [[0, 0, 200]], atol=1e-3)
    np.testing.assert_allclose(ops.gelu_tanh_forward(x[:, 1:]), [[0, 200]], atol=1e-3)


def test_erf_in_float32_is_within_its_bound():
    """The fit stays within 4e-7 of the error function everywhere, and gives its limits far out."""
    x = np.linspace(-6, 6, 20001, dtype=np.float32)
    expected = [math.erf(v) for v in x.tolist()]
    np.testing.assert_allclose(ops.erf_forward(x), expected, rtol=0, atol=4e-7)
    np.testing.assert_allclose(ops.erf_forward(np.array([[-3e38, 3e38]], np.float32)), [[-1, 1]], atol=4e-7)


def test_softcap_is_bounded_and_near_the_identity_around_zero():
    """Small values pass, large ones approach the cap."""
    np.testing.assert_allclose(ops.softcap_forward(np.array([0.01, 1e6, -1e6]), 5.0), [0.01, 5, -5], atol=1e-7)
