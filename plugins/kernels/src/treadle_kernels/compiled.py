"""Compiling, and the cache on disk that makes it happen once for a machine, a version and a set of sources.

Machine code is kept in `<user cache>/treadle/kernels/<key>`, or below TREADLE_KERNELS_CACHE. The key covers these
sources, numba, llvmlite and the machine. Files are written beside and renamed, so that processes may share the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import numba
import platformdirs
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

from treadle_kernels.machine import Machine, is_portable

CACHE = "TREADLE_KERNELS_CACHE"

# The modules that machine code is made of.
_COMPILED = (
    *("attention", "chunks", "compiled", "drawing", "emit", "machine", "memory", "products", "step", "tiles"),
    *("amx_products", "amx_tiles", "quantised_products", "quantised_tiles"),
    *("training_attention", "training_products", "vectors"),
    *("training_row_tiles", "training_rows", "training_tiles"),
)

if is_portable():
    # Numba asks the host unless it is told otherwise, and may have read its variables before this package is imported.
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = "generic", ""


def cache_folder() -> Path:
    """Return where this machine's compiled code of these sources lies; the folder need not exist."""
    base = os.environ.get(CACHE) or platformdirs.user_cache_path("treadle", appauthor=False) / "kernels"
    return Path(base) / _key(str(Machine.of_host()))


@functools.cache  # the sources that run are those that were there at first
def _key(machine: str) -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    parts = [python, version("numba"), version("llvmlite"), version("numpy"), machine]
    sources = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in _COMPILED]
    digest = hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *sources]))
    return digest.hexdigest()[:20]


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Puts all functions in one folder, whose name says everything that a stamp would.

    A folder that has them all need not be writable.
    """

    def __init__(self, function: Any, file: str) -> None:
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return cache_folder().name

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Any, file: str) -> Self:
        return cls(function, file)


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Files

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """Tell apart the functions that one definition makes: by what they close over, as the folder says the rest.

        Numba pickles that instead, and of functions among it everything they refer to: other bytes in every process.
        """
        return sig, codegen.magic_tuple(), _named(self._py_func)


def _named(value: Any) -> Any:
    """Return what a closure's value is, down to plain constants, the same in every process."""
    if isinstance(value, str | int | float):
        return value
    if not isinstance(value, FunctionType):
        raise TypeError(f"a compiled function closes over {value!r}, which has no name to keep it by")
    return (value.__qualname__, *(_named(cell.cell_contents) for cell in value.__closure__ or ()))


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a C function of one signature of a function, now; cached on disk."""

    def compile_now(function: Callable[..., Any]) -> Any:
        made: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nogil": True})
        made._cache = _Cache(function)  # noqa: SLF001 - as below
        made.compile()
        return made

    return compile_now


def entry_point(function: Callable[..., Any]) -> Any:
    """Compile a function with what it calls when it is first called, to run without the interpreter's lock; cached."""
    dispatcher = numba.njit(nogil=True)(function)
    dispatcher._cache = _Cache(dispatcher.py_func)  # noqa: SLF001 - what `cache=True` sets, with another folder
    return dispatcher
