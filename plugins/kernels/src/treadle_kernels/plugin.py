"""The entry point of the distribution. It imports no compiler: that happens when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from treadle_plugin_api import MissingExtraError, hookimpl
from treadle_plugin_api.backend import ComputeBackend
from treadle_plugin_api.backend_factory import BackendFactory

if find_spec("numba") is None:
    raise MissingExtraError("pip install numba")


def make_backend(dtype: str, numerics: str, *, quantise: bool = False) -> ComputeBackend[Any]:
    """Return the backend; where nothing is compiled yet, first have it compiled in a process of its own.

    It is reproducible whatever the numerics. Raises RuntimeError if compiling fails on this machine.
    """
    from treadle_kernels.machine import num_threads
    from treadle_kernels.warm_up import ensure_compiled

    threads = num_threads()
    ensure_compiled()
    from treadle_kernels.backend import KernelBackend

    return KernelBackend(threads, quantise=quantise)


@hookimpl
def treadle_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register `kernels`, and `kernels_int8`, which rounds every matrix to eight bits when it loads."""
    register(BackendFactory("kernels", make_backend, keeps=("float32", "bfloat16")))
    register(BackendFactory("kernels_int8", partial(make_backend, quantise=True)))
