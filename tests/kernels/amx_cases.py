"""What products on tiles must hold beside the tests of all products; `test_amx` runs it, on AMX or emulated."""

from __future__ import annotations

import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_products import bfloat16, draw, kernels_of, multiply, twin

FORMS = ["bfloat16", "bfloat16_rounded"]
HUGE = float(np.finfo(np.float32).max)


def draw_x(num_x: int, k: int, padding: int = 0) -> np.ndarray:
    """Draw rows of x, with NaN behind each."""
    x = np.full((num_x, k + padding), np.nan, np.float32)[:, :k]
    x[...] = np.random.default_rng(num_x).standard_normal((num_x, k))
    return x


def widened(weight: np.ndarray) -> np.ndarray:
    """Return stored bfloat16 as float32."""
    return (weight.astype(np.uint32) << 16).view(np.float32)


def stored(x: np.ndarray | list) -> np.ndarray:
    """Return numbers as bfloat16, as a file has them."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def at_the_end(array: np.ndarray) -> tuple[np.ndarray, mmap.mmap]:
    """Return a copy whose last byte is the last before a page that nobody may read, and the memory it lies in."""
    num_bytes = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes + mmap.PAGESIZE)
    room = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(room.ctypes.data + num_bytes), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = room[num_bytes - array.nbytes : num_bytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy, memory


def test_kernels_are_those_of_tiles():
    """The machine has tiles, and bfloat16 has its kernels on them."""
    from treadle_kernels import products
    from treadle_kernels.machine import Machine

    assert Machine.of_host().tiles
    assert products.packed_floats(64) == 2 * 48 + 1


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(
    num_x=st.integers(1, 50),
    num_weights=st.integers(1, 150),
    k=st.integers(1, 200),
    row=st.integers(0, 40),
    padding=st.integers(0, 40),
)
def test_products_agree_with_numpy(form, num_x, num_weights, k, row, padding):
    """Whatever the sizes, a product is NumPy's to float32's precision; NaN behind rows is not read."""
    weight, x = draw(form, row + num_weights, k, padding), draw_x(num_x, k, padding)
    if padding:
        weight.base[:, k:] = 0x7FC1
    bound = 2e-6 * twin(form, weight & 0x7FFF, np.abs(x)) + 1e-30
    assert (np.abs(multiply(form, weight, x, row) - twin(form, weight, x)[:, row:]) <= bound[:, row:]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [32, 75])
def test_a_row_has_the_same_bits_in_any_batch(form, k):
    """A row of x alone, beside 49 others or at another place, and a row of weights at any place, give the same bits."""
    weight, x = draw(form, 131, k), draw_x(50, k)
    together = multiply(form, weight, x)
    for row in range(len(x)):
        assert multiply(form, weight, x[row : row + 1])[0].tobytes() == together[row].tobytes()
    for first in (1, 7, 16, 33):
        assert multiply(form, weight, x[first:]).tobytes() == together[first:].tobytes()
        assert multiply(form, weight, x, row=first).tobytes() == together[:, first:].tobytes()
        assert multiply(form, weight[: 131 - first], x).tobytes() == together[:, : 131 - first].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_weights", "k"), [(1, 1), (16, 32), (5, 40), (33, 31), (64, 96), (67, 97)])
def test_nothing_behind_the_last_row_is_touched(form, num_weights, k):
    """A matrix, rows of x and their product may end where their memory does."""
    from treadle_kernels.products import ROW_GROUP, packed_floats
    from treadle_kernels.stored import address_of as at

    pack, product = kernels_of(form)
    for num_x in (1, 3, 17):
        given = (draw(form, num_weights, k), draw_x(num_x, k), np.zeros((num_x, num_weights), np.float32))
        packed = np.empty(-(-num_x // ROW_GROUP) * ROW_GROUP * packed_floats(k), np.float32)
        (weight, x, out, room), _ = zip(*map(at_the_end, (*given, packed)), strict=True)
        stride = pack(at(x), x.strides[0], num_x, k, at(room))
        product(at(weight), weight.strides[0], 0, num_weights, at(room), stride, num_x, k, at(out), out.strides[0])
        assert out.tobytes() == np.ascontiguousarray(multiply(form, weight, x)).tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, *np.array([0x7F800001, 0xFFBFFFFF], "u4").view("f4")])
def test_what_is_not_finite_stays_so(form, wrong):
    """Infinity stays infinity, NaN stays NaN however its bits are, in the rows that have it and in no others."""
    weight, x = draw(form, 40, 70), draw_x(20, 70)
    clean = multiply(form, weight, x)
    x[3, 10] = x[18, 69] = wrong
    found = multiply(form, weight, x)
    if np.isnan(wrong):
        assert np.isnan(found[[3, 18]]).all()
    else:
        signs = np.sign(widened(weight))
        np.testing.assert_array_equal(found[3], wrong * signs[:, 10])
        np.testing.assert_array_equal(found[18], wrong * signs[:, 69])
    others = np.delete(np.arange(20), [3, 18])
    assert found[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_seen(form, wrong):
    """A product with a weight that is infinite or NaN is not finite; its neighbours are."""
    weight, x = draw(form, 40, 70), draw_x(20, 70)
    weight[17, 3] = stored([wrong])[0]
    finite = np.isfinite(multiply(form, weight, x))
    assert not finite[:, 17].any()
    assert np.delete(finite, 17, axis=1).all()


def test_every_digit_counts():
    """Times one, and times powers of two, a float32 comes out as it went in, up to the largest."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 3200, dtype=np.uint32).view(np.float32)
    # Of the smallest numbers the last digits are denormal, which tiles take for zero.
    x = bits[np.isfinite(bits) & (np.abs(bits) > 2.0**-102)]
    x[:4] = HUGE, -HUGE, 1 + 2.0**-23, 2.0**-101 * (2 - 2.0**-23)
    found = multiply("bfloat16", stored([[1], [0.5], [-1]]), x[:, None])
    assert (found == np.stack([x, x / 2, -x], axis=1)).all()


@pytest.mark.parametrize("form", FORMS)
def test_huge_numbers_overflow_as_they_do_in_numpy(form):
    """What is beyond float32 is infinite, with its sign; what just fits does not become infinite."""
    fitting = HUGE if form == "bfloat16" else float(np.float32(3.3895314e38))  # the largest bfloat16
    x = np.array([[fitting, 0], [-fitting, 0], [fitting, fitting], [fitting / 2, 1]], np.float32)
    found = multiply(form, stored([[1, 1], [2, 0]]), x)
    wide = np.float32(fitting)
    assert found[:2].tolist() == [[wide, np.inf], [-wide, -np.inf]]
    assert found[2, 0] == np.inf
    assert np.isfinite(found[3]).all()


@pytest.mark.parametrize("form", FORMS)
def test_denormal_numbers_are_zeros_at_worst(form):
    """A number below float32's normal ones, in x or among the weights, adds itself or less than that, and no NaN."""
    tiny = np.array([[1e-40, -3e-39, 1e-45, 2.0**-126, 1.0]], np.float32)
    weight = stored([[1, 1, 1, 1, 1], [1e-39, -1e-39, 1e-39, 1e-39, 1e-39]])
    found = multiply(form, weight, tiny)
    assert abs(found[0, 0] - 1) <= 2e-38
    assert abs(found[0, 1]) <= 2e-39
    assert (np.abs(multiply(form, weight, tiny[:, :3])) <= 2.0**-126).all()


def test_a_model_agrees_with_numpys():
    """A small llama in every format computes NumPy's logits, in all its layers and its head."""
    from treadle_kernels.warm_up import check_kernels

    check_kernels()


@pytest.mark.parametrize("rounded", [False, True])
def test_chunking_a_prompt_changes_no_bit(rounded):
    """A prompt in one pass gives the bits that it gives token by token, and in two pieces."""
    from treadle_kernels import warm_up
    from treadle_kernels.backend import KernelBackend
    from treadle_plugin_api.backend import Batch
    from treadle_server.model.decoder import Decoder

    decoder = Decoder(warm_up.SMALL, warm_up._draw("bfloat16"), backend=KernelBackend(1, rounded=rounded))
    ids = np.random.default_rng(0).integers(0, warm_up.SMALL.vocab_size, 33)
    whole = decoder.head(decoder.forward(Batch.of([ids])))
    for cuts in (range(33), (0, 15)):
        cache, rows = decoder.new_cache(), []
        for start, stop in zip(cuts, [*cuts[1:], 33], strict=True):
            rows.append(decoder.head(decoder.forward(Batch.of([ids[start:stop]], [start]), [cache])))
        assert np.concatenate(rows).tobytes() == whole.tobytes()


def test_rounded_rows_are_rounded_once():
    """Rows that are rounded already give the bits of those that are not."""
    weight, x = draw("bfloat16", 20, 50), draw_x(5, 50)
    assert (
        multiply("bfloat16_rounded", weight, x).tobytes() == multiply("bfloat16_rounded", weight, bfloat16(x)).tobytes()
    )
