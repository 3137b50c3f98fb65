"""Quantised matrices: each kernel against its twin in NumPy, the same bits wherever they must be, and the layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import ArrayWeight, QuantisedWeight
from treadle_server.checkpoints.rounding import round_weight

FORMATS = {"int8": 8, "int4": 4}
OFFSETS = {"int8": 128, "int4": 8}
GROUP = 32


@functools.cache
def kernels_of(dtype: str):
    """The compiled `pack` and `multiply` of a format, as Python functions."""
    from treadle_kernels.quantised_products import make_quantised_kernels

    pack, multiply = make_quantised_kernels(FORMATS[dtype])
    return pack.ctypes, multiply.ctypes


@functools.cache
def portable_kernels():
    """Pack and the product of each format, compiled without the instruction for four bytes."""
    import treadle_kernels.quantised_tiles as tiles
    from numba import njit

    host = tiles.Machine.of_host()
    plain = replace(host, vnni=False)

    @njit
    def pack(x, k, offset, out, stride):
        tiles.pack_row(x, k, offset, out, stride)

    def strip(bits):
        @njit
        def multiply(panels, panel_bytes, row, count, x, stride, k, out):
            tiles.panel_strip(1, bits, (panels, panel_bytes, row, count), (x, stride, k, out, 0))

        return multiply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles.Machine, "of_host", lambda: plain)
        made = {dtype: strip(bits) for dtype, bits in FORMATS.items()}
        room = np.zeros(4096, np.uint8)
        at = room.ctypes.data
        pack(at, 1, 8, at + 1024, 40)
        for one in made.values():
            one(at, 544, 0, 1, at, 40, 1, at + 2048)
    return pack, made


def draw(dtype: str, num_rows: int, k: int) -> QuantisedWeight:
    """Draw a quantised matrix."""
    matrix = np.random.default_rng(num_rows * 1000 + k).standard_normal((num_rows, k)).astype(np.float32)
    return round_weight(ArrayWeight(matrix), dtype)


def laid_out(weight: QuantisedWeight):
    """Return a matrix in panels."""
    from treadle_kernels.panels import Panels

    return Panels.of(weight)


@dataclass(frozen=True)
class Packed:
    """Rows of x as kernels read them: numbers `[rows, groups * 32]`, scales and sums `[rows, groups]`."""

    numbers: np.ndarray
    scales: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, offset: int) -> Packed:
        """Pack x `[rows, k]` float32 in NumPy."""
        groups = -(-x.shape[1] // GROUP)
        padded = np.zeros((len(x), groups * GROUP), np.float32)
        padded[:, : x.shape[1]] = x
        parts = padded.reshape(len(x), groups, GROUP)
        largest = np.abs(parts).max(axis=2)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest < 1e-36, np.float32(0), np.float32(127) / largest)
        numbers = np.rint(parts * inverse[:, :, None]).astype(np.int8)
        scales = largest * np.float32(1 / 127)
        return cls(numbers.reshape(len(x), -1), scales, -offset * numbers.sum(axis=2, dtype=np.int32))

    @classmethod
    def read(cls, packed: np.ndarray, groups: int) -> Packed:
        """Take apart what a kernel packed, `[groups, rows, 40]`."""
        rows = np.ascontiguousarray(packed.transpose(1, 0, 2))
        scales, sums = rows.view(np.float32)[:, :, 8], rows.view(np.int32)[:, :, 9]
        return cls(rows[:, :, :GROUP].view(np.int8).reshape(len(rows), groups * GROUP), scales, sums)


def pack(dtype: str, x: np.ndarray) -> np.ndarray:
    """Pack rows x `[rows, k]`, strided or not, by the compiled kernel: `[groups, rows, 40]`."""
    out = np.zeros((-(-x.shape[1] // GROUP), len(x), 40), np.uint8)
    stride = kernels_of(dtype)[0](x.ctypes.data, x.strides[0], len(x), x.shape[1], out.ctypes.data)
    assert stride == out.strides[0]
    return out


def multiply(panels, packed: np.ndarray, first: int = 0, count: int | None = None) -> np.ndarray:
    """Return packed x `[groups, rows, 40]` times rows of a matrix from `first` on, turned, by the compiled kernel."""
    count = panels.num_rows - first if count is None else count
    num_x, packed = packed.shape[1], np.ascontiguousarray(packed)
    room = np.full((num_x, count + 2), np.nan, np.float32)
    at = (panels.data.ctypes.data, panels.data.strides[0], first, count, packed.ctypes.data, packed.strides[0], num_x)
    kernels_of(panels.dtype)[1](*at, panels.num_columns, room.ctypes.data + 4, room.strides[0])
    assert np.isnan(room[:, [0, -1]]).all()
    return np.ascontiguousarray(room[:, 1:-1])


def twin(weight: QuantisedWeight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the product in NumPy, groups summed in integers, and a bound of what float32 may be off by."""
    packed = Packed.of(x, 0)
    num_rows, k = weight.shape
    groups = packed.scales.shape[1]
    padded = np.zeros((num_rows, groups * GROUP), np.int64)
    padded[:, :k] = weight.integers()
    numbers = packed.numbers.astype(np.int64).reshape(len(x), groups, GROUP)
    exact = np.einsum("rgi,ngi->rng", numbers, padded.reshape(num_rows, groups, GROUP))
    terms = exact * (packed.scales[:, None].astype(np.float64) * weight.scales[None].astype(np.float64))
    return terms.sum(axis=2), 1e-6 * np.abs(terms).sum(axis=2) + 1e-30


SIZES = {"num_rows": st.integers(1, 70), "k": st.integers(1, 200)}


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), k=SIZES["k"], padding=st.integers(0, 5), power=st.integers(-60, 60))
def test_packing_has_numpys_bits(kernels, dtype, rows, k, padding, power):
    """Numbers, scales and sums of packed activations are those that NumPy makes, whatever the sizes and strides."""
    x = (np.random.default_rng(k).standard_normal((rows, k + padding)) * 2.0**power).astype(np.float32)[:, :k]
    x[0, : k // 2] = 0
    expected, groups = Packed.of(x, OFFSETS[dtype]), -(-k // GROUP)
    found = Packed.read(pack(dtype, x), groups)
    for name in ("numbers", "scales", "sums"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), **SIZES)
def test_products_agree_with_numpy(kernels, dtype, rows, num_rows, k):
    """A product is NumPy's of the rounded numbers, to float32's precision, and nothing beside it is written."""
    weight = draw(dtype, num_rows, k)
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    expected, bound = twin(weight, x)
    assert (np.abs(multiply(laid_out(weight), pack(dtype, x)) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 30), data=st.data(), **SIZES)
def test_a_row_has_the_same_bits_beside_any_others(kernels, dtype, rows, data, num_rows, k):
    """A product does not depend on how many rows x has, nor on where the rows of weights begin and end."""
    panels = laid_out(draw(dtype, num_rows, k))
    packed = pack(dtype, np.random.default_rng(7).standard_normal((rows, k)).astype(np.float32))
    together = multiply(panels, packed)
    for row in range(rows):
        assert multiply(panels, packed[:, row : row + 1])[0].tobytes() == together[row].tobytes()
    first = data.draw(st.integers(0, num_rows - 1))
    count = data.draw(st.integers(1, num_rows - first))
    part = np.ascontiguousarray(together[:, first : first + count])
    assert multiply(panels, packed, first, count).tobytes() == part.tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=20, deadline=None)
@given(**SIZES)
def test_the_portable_kernels_have_the_same_bits(kernels, dtype, num_rows, k):
    """Without the instruction that multiplies four bytes at once, packing and products have the same bits."""
    portable_pack, products = portable_kernels()
    panels, x = laid_out(draw(dtype, num_rows, k)), np.random.default_rng(k).standard_normal((1, k)).astype(np.float32)
    packed, out = pack(dtype, x), np.zeros((1, num_rows), np.float32)
    other = np.zeros_like(packed)
    portable_pack(x.ctypes.data, k, OFFSETS[dtype], other.ctypes.data, 40)
    assert other.tobytes() == packed.tobytes()
    panel_bytes = panels.data.strides[0]
    products[dtype](panels.data.ctypes.data, panel_bytes, 0, num_rows, packed.ctypes.data, 40, k, out.ctypes.data)
    assert out.tobytes() == multiply(panels, packed).tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_ends_of_the_range_are_exact(kernels, dtype):
    """The largest numbers of both signs, all of them together, make no sum overflow or saturate."""
    low, high = {"int8": (-128, 127), "int4": (-8, 7)}[dtype]
    numbers = np.array([[low] * 64, [high] * 64], np.int8)
    if dtype == "int4":
        from treadle_server.checkpoints.rounding import pack_halves

        numbers = pack_halves(numbers)
    weight = QuantisedWeight(numbers, np.ones((2, 2), np.float32), 64)
    x = np.array([[127] * 64, [-127] * 64], np.float32)
    expected = 64 * 127 * np.array([[low, high], [-low, -high]], np.float32)
    np.testing.assert_array_equal(multiply(laid_out(weight), pack(dtype, x)), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(kernels, value):
    """NaN or infinity among the activations is seen in every product of that row, and in no other."""
    x = np.ones((2, 70), np.float32)
    x[1, 40] = value
    found = multiply(laid_out(draw("int8", 20, 70)), pack("int8", x))
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=30, deadline=None)
@given(**SIZES)
def test_rows_of_panels_are_those_of_the_matrix(kernels, dtype, num_rows, k):
    """Rows looked up by number, in any order, are what the quantised matrix widens to."""
    from treadle_kernels.panels import PanelMatrix

    weight = draw(dtype, num_rows, k)
    wide = np.empty((num_rows, k), np.float32)
    weight.read_into(wide)
    ids = np.random.default_rng(0).integers(0, num_rows, (3, 4))
    np.testing.assert_array_equal(PanelMatrix([laid_out(weight)])[ids], wide[ids])
