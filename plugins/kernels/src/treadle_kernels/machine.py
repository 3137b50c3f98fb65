"""What the machine has that kernels are cut for, and the variables that say otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass

import llvmlite.binding as llvm

THREADS = "TREADLE_KERNELS_THREADS"
PORTABLE = "TREADLE_KERNELS_PORTABLE"

MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """How kernels are cut.

    Attributes:
        name: of the CPU, as LLVM calls it.
        features: what it has, as LLVM takes it.
        fused: multiply-add is one instruction; where it is not, a product is rounded before it is added.
        vnni: so are the products of four bytes and their sum, for 64 bytes at once.
        pairs: so are the products of two bfloat16 and their sum.
        tile_rows: rows of x in a tile of a product, whose sums stay in registers.
        tile_weights: rows of weights in a tile.
    """

    name: str
    features: str
    fused: bool
    vnni: bool
    pairs: bool
    tile_rows: int
    tile_weights: int

    @classmethod
    def of_host(cls) -> Machine:
        """Return this machine, or with TREADLE_KERNELS_PORTABLE=1 one that has what every CPU of its kind has."""
        if is_portable():
            return cls("generic", "", fused=False, vnni=False, pairs=False, tile_rows=2, tile_weights=1)
        features = llvm.get_host_cpu_features()
        wide = features.get("avx512f", False)
        arm = "aarch64" in llvm.get_default_triple() or "arm64" in llvm.get_default_triple()
        fused = arm or features.get("fma", False)
        vnni, pairs = (wide and features.get(name, False) for name in ("avx512vnni", "avx512bf16"))
        # 24 sums of 16 lanes beside what is multiplied fill 32 registers; a smaller register takes several for one sum.
        rows, weights = (6, 4) if wide else (2, 2)
        name, flags = llvm.get_host_cpu_name(), features.flatten()
        return cls(name, flags, fused=fused, vnni=vnni, pairs=pairs, tile_rows=rows, tile_weights=weights)


def is_portable() -> bool:
    """Whether kernels must run on every CPU of this machine's kind."""
    return os.environ.get(PORTABLE, "") not in ("", "0")


def num_threads() -> int:
    """Return how many threads compute: TREADLE_KERNELS_THREADS, or as many as this process may run on."""
    given = os.environ.get(THREADS, "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given:
        return min(available, MAX_THREADS)
    if not given.isdecimal() or not 1 <= int(given) <= MAX_THREADS:
        raise ValueError(f"{THREADS} must be a number from 1 to {MAX_THREADS}, but is {given!r:.40}")
    return int(given)
