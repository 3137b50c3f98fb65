"""Memory between the steps of a training run."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h: where trimming begins, how many blocks may come straight from the system, how many heaps may be.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let this process keep the memory that arrays give back, where the C library can be told so (glibc).

    A step frees what it made, and the next one asks for the same again: a tenth of its time would go to fetching pages
    from the system, zeroed, that were there before.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_ARENA_MAX, 1)  # a thread's own heap has no room for large arrays
