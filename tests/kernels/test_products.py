"""Products with stored matrices: each kernel against its twin in NumPy, over odd sizes, strides and formats."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FORMS = ["float32", "bfloat16", "bfloat16_rounded"]


@functools.cache
def kernels_of(form: str):
    """The compiled `pack` and `multiply` of a format, as Python functions."""
    from treadle_kernels.products import make_kernels

    pack, multiply = make_kernels(form)
    return pack.ctypes, multiply.ctypes


def multiply(form: str, weight: np.ndarray, x: np.ndarray, row: int = 0) -> np.ndarray:
    """Return x `[rows, k]` times weight `[n, k]` from a row on, turned; strides as the arrays have them."""
    from treadle_kernels.products import ROW_GROUP, packed_floats
    from treadle_kernels.stored import address_of as at

    pack, product = kernels_of(form)
    (num_x, k), count = x.shape, len(weight) - row
    num_floats = -(-num_x // ROW_GROUP) * ROW_GROUP * packed_floats(k)
    packed = np.full(num_floats + 1, np.nan, np.float32)
    stride = pack(at(x), x.strides[0], num_x, k, at(packed))
    assert stride <= 4 * packed_floats(k)
    assert np.isnan(packed[-1])
    out = np.full((num_x, count + 1), 7, np.float32)
    product(at(weight), weight.strides[0], row, count, at(packed), stride, num_x, k, at(out), out.strides[0])
    assert (out[:, count] == 7).all()
    return out[:, :count]


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 rounded to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def twin(form: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the same in float64 by NumPy."""
    wide = (weight.astype(np.uint32) << 16).view(np.float32) if weight.dtype == np.uint16 else weight
    return (bfloat16(x) if form == "bfloat16_rounded" else x).astype(np.float64) @ wide.astype(np.float64).T


def draw(form: str, num_weights: int, k: int, padding: int = 0) -> np.ndarray:
    """Draw a matrix whose rows lie `padding` numbers apart."""
    rng = np.random.default_rng(num_weights * 1000 + k)
    full = rng.standard_normal((num_weights, k + padding), dtype=np.float32)
    return (full if form == "float32" else (full.view(np.uint32) >> 16).astype(np.uint16))[:, :k]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    num_weights=st.integers(1, 23),
    k=st.integers(1, 130),
    padding=st.integers(0, 5),
    x_padding=st.integers(0, 5),
)
def test_products_agree_with_numpy(kernels, form, rows, num_weights, k, padding, x_padding):
    """Whatever the sizes and strides, a product is NumPy's to float32's precision, and nothing else is written."""
    weight = draw(form, num_weights, k, padding)
    x = np.random.default_rng(rows).standard_normal((rows, k + x_padding)).astype(np.float32)[:, :k]
    sizes = np.abs(weight) if form == "float32" else weight & 0x7FFF
    bound = 2e-6 * twin(form, sizes, np.abs(x)) + 1e-30
    assert (np.abs(multiply(form, weight, x) - twin(form, weight, x)) <= bound).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [16, 37, 576])
def test_a_row_has_the_same_bits_beside_any_others(kernels, form, k):
    """A row's product does not depend on how many rows there are, or on where among the weights a row of them lies."""
    weight = draw(form, 29, k)
    x = np.random.default_rng(7).standard_normal((19, k)).astype(np.float32)
    together = multiply(form, weight, x)
    for row in range(len(x)):
        assert multiply(form, weight, x[row : row + 1])[0].tobytes() == together[row].tobytes()
    assert multiply(form, weight, x, row=5).tobytes() == together[:, 5:].tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_behind_a_row_is_not_read(kernels, form):
    """NaN behind the last number of a row of weights or of x changes nothing."""
    weight = draw(form, 3, 21, padding=31)
    weight.base[:, 21:] = np.nan if form == "float32" else 0x7FC0
    x = np.full((2, 40), np.nan, np.float32)[:, :21]
    x[...] = 1
    assert np.isfinite(multiply(form, weight, x)).all()


def first_row(packed: np.ndarray) -> np.ndarray:
    """Return 640 bfloat16 of the first of some packed rows: they lie in its order, or in tiles for 16 rows."""
    from treadle_kernels.products import TILES

    if not TILES:
        return packed.view(np.uint16)[:640]
    start = -packed.ctypes.data % 64 // 4  # tiles begin where lines of memory do
    return packed[start : start + 5120].view(np.uint16).reshape(20, 16, 16, 2)[:, :, 0].ravel()


def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(kernels):
    """Packed as bfloat16, numbers are those that ml_dtypes rounds to; NaN stays NaN, however its bits are."""
    from treadle_kernels.products import ROW_GROUP, packed_floats
    from treadle_kernels.stored import address_of as at

    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 640, dtype=np.uint32).view(np.float32)
    x[:6] = np.array([0x7FFFFFFF, 0x7F800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000000], np.uint32).view(
        np.float32
    )
    packed = np.zeros(ROW_GROUP * packed_floats(640), np.float32)
    kernels_of("bfloat16_rounded")[0](at(x), 0, 1, len(x), at(packed))
    with np.errstate(invalid="ignore"):
        found, expected = first_row(packed).view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16)
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert (found[~np.isnan(x)] == expected[~np.isnan(x)]).all()


def test_pairs_have_a_portable_twin(kernels):
    """Where two bfloat16 are not multiplied at once, the widened ones are, to float32's precision."""
    from dataclasses import replace

    from numba import njit
    from treadle_kernels.machine import Machine
    from treadle_kernels.stored import address_of as at
    from treadle_kernels.tiles import dot_strip

    @njit
    def dot(weight, x, k, out):
        dot_strip(1, 1, "bfloat16_rounded", (weight, 0, 1, weight, 0), (x, 0, k, out, 0))

    a, b = (draw("bfloat16", 1, 96)[0] ^ np.uint16(number) for number in (0, 3))
    out, plain = np.zeros(1, np.float32), replace(Machine.of_host(), pairs=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "of_host", lambda: plain)
        dot(at(a), at(b), 96, at(out))
    expected = twin("bfloat16", a[None], (b.astype(np.uint32) << 16).view(np.float32)[None])
    np.testing.assert_allclose(out, expected[0], rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 120), sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3), k=st.integers(1, 60))
def test_a_shared_product_agrees_with_one_kernel(kernels, rows, sizes, k):
    """A matrix in pieces, multiplied by two threads in chunks, has the bits of the pieces' products side by side."""
    from treadle_kernels.stored import StoredMatrix
    from treadle_server.model.prepared import Linear

    pieces = [draw("bfloat16", size, k) for size in sizes]
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    out = np.full((rows, sum(sizes)), np.nan, np.float32)
    kernels.linear(x, Linear(StoredMatrix(pieces), None), out)
    expected = np.concatenate([multiply("bfloat16", np.ascontiguousarray(piece), x) for piece in pieces], axis=1)
    assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_a_bias_is_added_and_any_layout_is_taken(kernels):
    """What is multiplied may be strided and out a part of something wider; the bias is added once."""
    from treadle_kernels.stored import StoredMatrix
    from treadle_server.model.prepared import Linear

    weight = draw("float32", 40, 30)
    x = np.random.default_rng(0).standard_normal((4, 60)).astype(np.float32)[:, ::2]
    room, bias = np.zeros((4, 50), np.float32), np.arange(40, dtype=np.float32)
    kernels.linear(x, Linear(StoredMatrix([weight]), bias), room[:, :40])
    np.testing.assert_allclose(room[:, :40], x @ weight.T + bias, atol=1e-4)
    assert (room[:, 40:] == 0).all()
