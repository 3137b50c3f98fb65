"""Products with stored matrices: each kernel against its twin in NumPy, over odd sizes, strides and formats."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FORMATS = ["float32", "uint16", "int8"]
GROUP = 32  # numbers that share a scale


@functools.cache
def kernel_of(stored: str):
    """The compiled kernel of a format."""
    from treadle_kernels.products import make_kernel

    return make_kernel(stored)


def multiply(stored: str, weight: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return x `[rows, k]` times weight `[n, k]`, turned, by the compiled kernel; strides as the arrays have them."""
    from treadle_kernels.stored import address_of as at

    out = np.full((len(x), len(weight)), np.nan, np.float32)
    sizes = (weight.strides[0], len(weight), at(scales), scales.strides[0], 5)
    kernel_of(stored).ctypes(at(weight), *sizes, at(x), x.strides[0], len(x), x.shape[1], at(out), out.strides[0])
    return out


def twin(stored: str, weight: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the same in float64 by NumPy."""
    wide = (weight.astype(np.uint32) << 16).view(np.float32) if stored == "uint16" else weight
    if stored == "int8":
        wide = wide * np.repeat(scales, GROUP, axis=1)[:, : weight.shape[1]]
    return x.astype(np.float64) @ wide.astype(np.float64).T


def draw(stored: str, num_weights: int, k: int, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw a matrix whose rows lie `padding` numbers apart, and scales."""
    rng = np.random.default_rng(num_weights * 1000 + k)
    full = rng.standard_normal((num_weights, k + padding), dtype=np.float32)
    bfloat16, int8 = (full.view(np.uint32) >> 16).astype(np.uint16), (40 * full).astype(np.int8)
    matrix = {"float32": full, "uint16": bfloat16, "int8": int8}[stored][:, :k]
    return matrix, rng.random((num_weights, -(-k // GROUP)), dtype=np.float32)


@pytest.mark.parametrize("stored", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    num_weights=st.integers(1, 23),
    k=st.integers(1, 130),
    padding=st.integers(0, 5),
    x_padding=st.integers(0, 5),
)
def test_products_agree_with_numpy(kernels, stored, rows, num_weights, k, padding, x_padding):
    """Whatever the sizes and strides, a product is NumPy's to float32's precision, and nothing else is written."""
    weight, scales = draw(stored, num_weights, k, padding)
    x = np.random.default_rng(rows).standard_normal((rows, k + x_padding)).astype(np.float32)[:, :k]
    expected = twin(stored, weight, scales, x)
    sizes = weight & 0x7FFF if stored == "uint16" else np.abs(weight)
    bound = 2e-6 * twin(stored, sizes, scales, np.abs(x)) + 1e-30
    assert (np.abs(multiply(stored, weight, scales, x) - expected) <= bound).all()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("k", [16, 37, 576])
def test_a_row_has_the_same_bits_beside_any_others(kernels, stored, k):
    """A row's product does not depend on how many rows there are, or on where among the weights a row of them lies."""
    weight, scales = draw(stored, 29, k)
    x = np.random.default_rng(7).standard_normal((19, k)).astype(np.float32)
    together = multiply(stored, weight, scales, x)
    for row in range(len(x)):
        assert multiply(stored, weight, scales, x[row : row + 1])[0].tobytes() == together[row].tobytes()
    later = multiply(stored, weight[5:], scales[5:], x)
    assert later.tobytes() == np.ascontiguousarray(together[:, 5:]).tobytes()


def test_what_lies_behind_a_row_is_not_read(kernels):
    """NaN behind the last number of a row changes nothing."""
    weight, scales = draw("float32", 3, 21, padding=11)
    weight.base[:, 21:] = np.nan
    x = np.full((2, 40), np.nan, np.float32)[:, :21]
    x[...] = 1
    assert np.isfinite(multiply("float32", weight, scales, x)).all()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 120), sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3), k=st.integers(1, 60))
def test_a_shared_product_agrees_with_one_kernel(kernels, rows, sizes, k):
    """A matrix in pieces, multiplied by two threads in chunks, has the bits of the pieces' products side by side."""
    from treadle_kernels.stored import StoredMatrix
    from treadle_server.model.prepared import Linear

    pieces = [draw("uint16", size, k)[0] for size in sizes]
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    out = np.full((rows, sum(sizes)), np.nan, np.float32)
    kernels.linear(x, Linear(StoredMatrix(pieces), None), out)
    scales = np.ones((1, 1), np.float32)
    expected = np.concatenate([multiply("uint16", np.ascontiguousarray(piece), scales, x) for piece in pieces], axis=1)
    assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_a_bias_is_added_and_any_layout_is_taken(kernels):
    """What is multiplied may be strided and out a part of something wider; the bias is added once."""
    from treadle_kernels.stored import StoredMatrix
    from treadle_server.model.prepared import Linear

    weight, _ = draw("float32", 40, 30)
    x = np.random.default_rng(0).standard_normal((4, 60)).astype(np.float32)[:, ::2]
    room, bias = np.zeros((4, 50), np.float32), np.arange(40, dtype=np.float32)
    kernels.linear(x, Linear(StoredMatrix([weight]), bias), room[:, :40])
    np.testing.assert_allclose(room[:, :40], x @ weight.T + bias, atol=1e-4)
    assert (room[:, 40:] == 0).all()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 100), power=st.integers(-30, 30))
def test_rounding_to_int8_is_off_by_half_a_step_at_most(rows, width, power):
    """Each group of 32 has the scale of its largest number, whatever its size; a group of zeros stays zero."""
    from treadle_kernels.stored import quantised

    matrix = (np.random.default_rng(width).standard_normal((rows, width)) * 2.0**power).astype(np.float32)
    matrix[0] = 0
    numbers, scales = quantised(matrix)
    wide = np.repeat(scales, GROUP, axis=1)[:, :width]
    assert (np.abs(numbers) <= 127).all()
    assert (np.abs(numbers * wide - matrix) <= 0.5001 * wide).all()
    assert (numbers[0] == 0).all()
