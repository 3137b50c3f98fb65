"""The plugin's door, compiling in a process of its own, and the portable path."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from treadle_server.model.decoder import make_backend
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource


def test_the_plugin_brings_the_backend(kernels):
    """It is registered by the public hook and makes a backend that is reproducible in every mode."""
    import treadle_kernels.plugin

    source = PluginSource("kernels", "treadle-kernels", "0.1.0", lambda: treadle_kernels.plugin)
    manager = PluginManager([source], strict=True)
    assert manager.backends.names == ("kernels",)
    assert make_backend("kernels", "float32", "fast", manager.backends.parts()).name == "kernels"


def test_the_door_imports_no_compiler():
    """Starting the command line with the plugin installed does not import numba."""
    code = "import sys, treadle_kernels.plugin; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def calls(kernels, monkeypatch, tmp_path):
    """The commands that were run, in place of a compiler, for a cache that is empty at first."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("TREADLE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_cold_cache_says_so(calls, tmp_path, caplog):
    """What compiles is a process of its own, and the log has a line before it starts and one when it is through."""
    from treadle_kernels import warm_up

    with caplog.at_level(logging.WARNING):
        warm_up.ensure_compiled()
    assert calls == [[sys.executable, "-P", "-m", "treadle_kernels.warm_up", warm_up.WITH_PARENT]]
    assert str(tmp_path) in caplog.messages[0]
    assert caplog.messages[1].startswith("compiled kernels in ")


@pytest.mark.parametrize("damage", ["cut", "gone", "mark"])
def test_a_damaged_cache_is_made_again(calls, caplog, damage):
    """A file that is shorter than it was, or is not there, or a mark that says nothing: everything is compiled anew."""
    from treadle_kernels import warm_up
    from treadle_kernels.compiled import cache_folder

    marker, code = cache_folder() / warm_up.MARK, cache_folder() / "step.1.nbc"
    code.parent.mkdir()
    code.write_bytes(b"12345")
    warm_up.leave_mark(marker)
    warm_up.ensure_compiled()
    assert not calls
    if damage == "mark":
        marker.write_text("")
    elif damage == "cut":
        code.write_bytes(b"123")
    else:
        code.unlink()
    warm_up.ensure_compiled()
    assert len(calls) == 1
    assert not code.exists()
    assert "damaged or gone" in caplog.text


@pytest.mark.parametrize("check", ["warm_up.check_kernels", "training_warm_up.check_training"])
def test_a_warm_cache_is_all_that_another_process_needs(kernels, training, check):
    """A process that runs every kernel finds each of them: it leaves no file that was not there, and changes none."""
    from treadle_kernels.compiled import cache_folder

    def listed() -> dict[str, float]:
        return {one.name: one.stat().st_mtime for one in cache_folder().glob("*.nb[ic]")}

    module, function = check.split(".")
    code = f"from treadle_kernels.{module} import {function}; {function}()"
    before = listed()
    assert before
    subprocess.run([sys.executable, "-c", code], check=True)
    assert listed() == before


def test_nobody_is_left_compiling(kernels):
    """The process that compiles ends when the one that started it does."""
    code = "from treadle_kernels.warm_up import end_with_parent; import time; end_with_parent(); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, "--with-parent"], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=3)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=30) == 1


def test_a_compiler_that_fails_is_told(kernels, monkeypatch, tmp_path):
    """The last line of what the process wrote is in the error."""
    from treadle_kernels import warm_up

    done = subprocess.CompletedProcess([], -4, "", "some trace\nIllegal instruction\n")
    monkeypatch.setenv("TREADLE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="status -4: Illegal instruction"):
        warm_up.ensure_compiled()


PORTABLE_PRODUCTS = """
import ml_dtypes, numpy as np
from treadle_kernels.backend import KernelBackend
from treadle_kernels.machine import Machine
from treadle_kernels.stored import StoredMatrix
from treadle_server.model.prepared import Linear

assert not Machine.of_host().fused
rng = np.random.default_rng(0)
weight, x = rng.standard_normal((37, 51)).astype(np.float32), rng.standard_normal((11, 51)).astype(np.float32)
half = weight.astype(ml_dtypes.bfloat16)
for matrix, wide in ((weight, weight), (half.view(np.uint16), half.astype(np.float32))):
    out = np.empty((11, 37), np.float32)
    KernelBackend(1).linear(x, Linear(StoredMatrix([matrix]), None), out)
    np.testing.assert_allclose(out, x @ wide.T, atol=1e-4)
"""


def test_the_portable_path_computes(kernels):
    """Without any instruction beyond the architecture's first, products agree with NumPy's.

    The whole of this folder runs that way with TREADLE_KERNELS_PORTABLE=1.
    """
    environment = os.environ | {"TREADLE_KERNELS_PORTABLE": "1"}
    command = [sys.executable, "-c", PORTABLE_PRODUCTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "reason"), [("0", "from 1 to 16"), ("many", "but is 'many'"), ("17", "but is '17'")])
def test_a_wrong_number_of_threads_is_told(kernels, monkeypatch, given, reason):
    """The variable's name, its range and its value are in the error."""
    from treadle_kernels.machine import num_threads

    monkeypatch.setenv("TREADLE_KERNELS_THREADS", given)
    with pytest.raises(ValueError, match=f"TREADLE_KERNELS_THREADS must be .*{reason}|{reason}"):
        num_threads()
