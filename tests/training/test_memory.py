"""Memory that a process keeps between steps."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, threading
import numpy as np
from treadle_server.training.memory import keep_freed_memory

def fill():
    np.ones(40_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(40_000_000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if {keeping}:
    keep_freed_memory()
thread = threading.Thread(target=fill)
thread.start()
thread.join()
"""


def faults(keeping: bool) -> int:
    """Return how often a thread must fetch memory from the system for an array as large as one that it has freed."""
    code = COUNT_FAULTS.format(keeping=keeping)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt"
)
def test_freed_memory_is_used_again() -> None:
    """The second array takes the place of the first, in whatever thread; without the call it is fetched anew."""
    assert faults(keeping=True) < 20 < faults(keeping=False)
