"""The entry point of the distribution. It imports no compiler: that happens when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from treadle_plugin_api import MissingExtraError, hookimpl
from treadle_plugin_api.backend import ComputeBackend, DifferentiableBackend
from treadle_plugin_api.backend_factory import BackendFactory

if find_spec("numba") is None:
    raise MissingExtraError("pip install numba")


def make_backend(dtype: str, numerics: str, *, activations: str = "float32") -> ComputeBackend[Any]:
    """Return the backend; where nothing is compiled yet, first have it compiled in a process of its own.

    It is reproducible whatever the numerics. Raises RuntimeError if compiling fails on this machine.
    """
    from treadle_kernels.machine import num_threads
    from treadle_kernels.warm_up import ensure_compiled

    threads = num_threads()
    ensure_compiled()
    from treadle_kernels.backend import KernelBackend

    return KernelBackend(threads, rounded=activations == "bf16")


def make_training(dtype: str) -> DifferentiableBackend[Any]:
    """Return the backend that trains, compiled before like the other. Raises RuntimeError if that fails."""
    from treadle_kernels import training_warm_up
    from treadle_kernels.warm_up import ensure_compiled

    ensure_compiled(training_warm_up.__name__, training_warm_up.MARK)
    from treadle_kernels.training_backend import TrainingBackend

    return TrainingBackend()


@hookimpl
def treadle_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register `kernels`."""
    keeps = ("float32", "bfloat16", "int8", "int4")
    register(
        BackendFactory(
            "kernels", make_backend, keeps=keeps, activations=("float32", "bf16"), make_training=make_training
        )
    )
