"""`treadle quantize`, and `--quantize`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
OPTIONS = ("the cat", "--temperature", "0", "--max-tokens", "12", "--ignore-eos")
compiled = pytest.mark.skipif(
    find_spec("treadle_kernels") is None or find_spec("numba") is None, reason="treadle-kernels is not installed"
)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantised_folder_generates(treadle: Run, tiny_folder: Path, tmp_path: Path, dtype: str) -> None:
    """What it writes loads like the model; --json says where it is."""
    written = treadle("quantize", tiny_folder, "--to", dtype, "--out", tmp_path / "q", "--json")
    document = json.loads(written.stdout)
    assert (document["folder"], document["dtype"]) == (str(tmp_path / "q"), dtype)
    assert 0 < document["num_bytes"] < (tiny_folder / "model.safetensors").stat().st_size
    assert treadle("generate", "-m", tmp_path / "q", "--backend", "numpy", *OPTIONS).stdout.strip()


@compiled
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_option_and_the_folder_generate_alike(treadle: Run, tiny_folder: Path, tmp_path: Path, dtype: str) -> None:
    """`--quantize` at load gives the text of the folder that was quantised before."""
    treadle("quantize", tiny_folder, "--to", dtype, "--out", tmp_path / "q")
    saved = treadle("generate", "-m", tmp_path / "q", "--backend", "kernels", *OPTIONS)
    rounded = treadle("generate", "-m", tiny_folder, "--quantize", dtype, *OPTIONS)
    assert saved.stdout == rounded.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantize", "int8", "--backend", "numpy"), "quantize is int8, but the compute backend 'numpy' does not"),
        (("--quantize", "int3"), "quantize: Input should be 'int8' or 'int4', got 'int3'"),
    ],
)
def test_what_cannot_be_rounded_is_told(treadle: Run, tiny_folder: Path, options: Any, message: str) -> None:
    """The error names the option, and what was given."""
    assert message in treadle("generate", "-m", tiny_folder, *options, *OPTIONS, status=1).stderr


def test_a_server_that_runs_is_not_asked(treadle: Run) -> None:
    """--quantize sets up a server in this process, so it does not go with --target."""
    result = treadle("generate", "x", "--target", "127.0.0.1:1", "--quantize", "int8", status=2)
    assert "--quantize sets up a server in this process" in result.stderr


def test_errors_of_the_command(treadle: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """An unknown size is wrong use; a folder that holds something is kept."""
    assert "int2" in treadle("quantize", tiny_folder, "--to", "int2", "--out", tmp_path / "q", status=2).stderr
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").write_text("x", "utf-8")
    assert "holds something already" in treadle("quantize", tiny_folder, "--out", tmp_path / "q", status=1).stderr
