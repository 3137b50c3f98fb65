"""The safetensors reader's checks and widening, and the writer's guard against scrambled arrays."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_server.checkpoints import safetensors_io
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.errors import CheckpointError, UnsupportedModelError


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    """Make a header entry, by default of two float32 numbers."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture(params=["float32", "float64"])
def wide(request) -> np.dtype:
    """The dtypes that a backend computes in."""
    return np.dtype(request.param)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 22])
def test_every_float_format_is_read_and_widened_exactly(tmp_path, monkeypatch, wide, dtype, chunk_bytes):
    """Rows and transposed columns arrive exactly, in pieces of any size, in contiguous and strided buffers."""
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", chunk_bytes)
    stored = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    write_safetensors(tmp_path / "a.safetensors", {"other": np.ones(3, np.float32), "x": stored})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    expected = stored.astype(wide)
    rows, strided, columns = np.empty((4, 5), wide), np.empty((5, 7), wide), np.empty((2, 7), wide)
    file.read_rows_into("x", 2, rows)
    file.read_rows_into("x", 0, strided.T)
    file.read_columns_into("x", slice(1, 3), columns)
    np.testing.assert_array_equal(rows, expected[2:6])
    np.testing.assert_array_equal(strided.T, expected)
    np.testing.assert_array_equal(columns, expected[:, 1:3].T)
    np.testing.assert_array_equal(file.map("x"), stored)
    file.close()


def test_bfloat16_widens_every_pattern(tmp_path):
    """All 65,536 bit patterns become the float32 with the same upper half, NaN and infinities included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    write_safetensors(tmp_path / "a.safetensors", {"x": patterns.view(ml_dtypes.bfloat16)})
    file, out = SafetensorsFile(tmp_path / "a.safetensors"), np.empty(1 << 16, np.float32)
    file.read_rows_into("x", 0, out)
    file.close()
    np.testing.assert_array_equal(out.view(np.uint32), patterns.astype(np.uint32) << 16)


def test_a_mapped_tensor_outlives_the_file_object_and_a_replacement_on_disk(tmp_path):
    """Closing the file, or renaming another over it, leaves a map as it was; maps cannot be written."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.ones(4, np.float32)})
    file = SafetensorsFile(path)
    write_safetensors(tmp_path / "b.safetensors", {"x": np.zeros(4, np.float32)})
    (tmp_path / "b.safetensors").rename(path)
    mapped = file.map("x")
    file.close()
    assert mapped.tolist() == [1, 1, 1, 1]
    assert not mapped.flags.writeable


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3).T, np.arange(12.0).reshape(3, 4)[:, ::2], np.float32(3).reshape(())]
)
def test_strided_arrays_are_written_in_the_order_they_are_read(tmp_path, array):
    """Transposed and sliced views come back as they look, which the library alone does not do."""
    write_safetensors(tmp_path / "a.safetensors", {"x": array})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(file.map("x"), array)
    file.close()


def test_data_that_is_not_aligned_is_read(tmp_path):
    """The format does not align its data; reading and mapping work at an odd offset."""
    data = b"x" + np.array([1.5, 2.5], np.float32).tobytes()
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [2], [1, 9])}
    file = SafetensorsFile(write_raw(tmp_path / "a.safetensors", json.dumps(header).encode().ljust(121), data))
    assert file.tensors["b"].offset % 4
    out = np.empty(2)
    file.read_rows_into("b", 0, out)
    assert out.tolist() == file.map("b").tolist() == [1.5, 2.5]
    file.close()


def test_a_scrambled_write_is_noticed(tmp_path, monkeypatch):
    """When what is on disk differs from what was given, writing raises and names the tensor."""
    real = safetensors_io.safetensors.numpy.save_file

    def scramble(tensors, path, metadata):
        real({name: array[::-1].copy() for name, array in tensors.items()}, path, metadata)

    monkeypatch.setattr(safetensors_io.safetensors.numpy, "save_file", scramble)
    with pytest.raises(CheckpointError, match=r"'x' reads back different"):
        write_safetensors(tmp_path / "a.safetensors", {"x": np.arange(3.0)})


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    """Writing to and reading from nowhere raise CheckpointError with the path."""
    with pytest.raises(CheckpointError, match=r"gone.*cannot be written"):
        write_safetensors(tmp_path / "gone" / "a.safetensors", {"x": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"gone.*cannot be opened"):
        SafetensorsFile(tmp_path / "gone")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"x": 1, "x": 2}', b"", "a name appears twice"),
        ([1], b"", "must be a JSON object"),
        ({"x": 3}, b"", "'x' must have dtype, shape, data_offsets"),
        ({"x": entry(shape=[-1])}, b"", "'x' has malformed shape or offsets"),
        ({"x": entry(shape=[2.0])}, b"", "'x' has malformed shape or offsets"),
        ({"x": entry(shape=[True])}, b"", "'x' has malformed shape or offsets"),
        ({"x": entry(offsets=[0])}, b"", "'x' has malformed shape or offsets"),
        ({"x": entry(dtype=4)}, b"", "'x' has a malformed dtype"),
        ({"x": entry(offsets=[0, 4])}, b"1234", r"'x' of F32 \[2\] needs 8 bytes, but has 4"),
        ({"x": entry(offsets=[8, 0])}, b"12345678", r"needs 8 bytes, but has -8"),
        ({"x": entry()}, b"1234567", "cut short inside tensor 'x'"),
        ({"x": entry()}, b"123456789", "1 bytes follow the last tensor"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, b"x" * 12, "'y' overlaps"),
        ({"x": entry(), "y": entry()}, b"x" * 8, "'y' overlaps"),
        ({"x": entry(offsets=[4, 12])}, b"x" * 12, "'x' leaves a gap"),
        ({"x": entry(shape=[1 << 61, 1 << 61], offsets=[0, 8])}, b"x" * 8, "needs"),
    ],
)
def test_a_damaged_file_is_refused_before_any_tensor_is_read(tmp_path, header, data, message):
    """Header and data must fit each other exactly; the error names file and tensor."""
    path = write_raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", (1 << 62).to_bytes(8, "little") + b"{}"])
def test_a_file_too_short_for_its_header_is_refused(tmp_path, content):
    """An empty file, a cut length and a length past the end raise CheckpointError."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a safetensors file, or cut short"):
        SafetensorsFile(tmp_path / "a")


@given(st.binary(max_size=60))
def test_garbage_never_gets_past_the_reader(tmp_path_factory, content):
    """Any bytes either are a safetensors file or raise CheckpointError."""
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        SafetensorsFile(path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "F4_SOMETHING"])
def test_formats_that_are_no_plain_floats_are_refused_by_name(tmp_path, dtype):
    """The error names file, tensor and format."""
    size = {"F8_E4M3": 1, "I32": 4}.get(dtype, 3)
    path = write_raw(tmp_path / "a.safetensors", {"x": entry(dtype, [1], [0, size])}, b"x" * size)
    file = SafetensorsFile(path)
    with pytest.raises(UnsupportedModelError, match=rf"a.safetensors: tensor 'x' is stored as {dtype}"):
        file.dtype("x")
    file.close()


def test_a_file_cut_while_open_is_noticed(tmp_path):
    """Reading past a new end raises instead of returning what memory held."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.ones(1000, np.float32)})
    file = SafetensorsFile(path)
    with path.open("r+b") as handle:
        handle.truncate(500)
    with pytest.raises(CheckpointError, match=r"ends inside tensor 'x'"):
        file.read_rows_into("x", 0, np.empty(1000, np.float32))
    file.close()
