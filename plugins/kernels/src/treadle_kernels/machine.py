"""What the machine has that kernels are cut for, and the variables that say otherwise."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

THREADS = "TREADLE_KERNELS_THREADS"
PORTABLE = "TREADLE_KERNELS_PORTABLE"
AMX = "TREADLE_KERNELS_AMX"

MAX_THREADS = 16
_NO = ("0", "no", "off", "false")

# Linux's own numbers: the call `arch_prctl` of x86-64, its request for a part of the registers, and that part.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Machine:
    """How kernels are cut.

    Attributes:
        name: of the CPU, as LLVM calls it.
        features: what it has, as LLVM takes it.
        fused: multiply-add is one instruction; where it is not, a product is rounded before it is added.
        vnni: so are the products of four bytes and their sum, for 64 bytes at once.
        pairs: so are the products of two bfloat16 and their sum.
        tiles: so is the product of 16 rows of 32 bfloat16 with as many (AMX).
        tile_rows: rows of x in a tile of a product, whose sums stay in registers.
        tile_weights: rows of weights in a tile.
    """

    name: str
    features: str
    fused: bool
    vnni: bool
    pairs: bool
    tiles: bool
    tile_rows: int
    tile_weights: int

    @classmethod
    def of_host(cls) -> Machine:
        """Return this machine, or with TREADLE_KERNELS_PORTABLE=1 one that has what every CPU of its kind has."""
        if is_portable():
            plain = {"fused": False, "vnni": False, "pairs": False, "tiles": False}
            return cls("generic", "", **plain, tile_rows=2, tile_weights=1)
        features = llvm.get_host_cpu_features()
        wide = features.get("avx512f", False)
        arm = "aarch64" in llvm.get_default_triple() or "arm64" in llvm.get_default_triple()
        fused = arm or features.get("fma", False)
        vnni, pairs = (wide and features.get(name, False) for name in ("avx512vnni", "avx512bf16"))
        # 24 sums of 16 lanes beside what is multiplied fill 32 registers; a smaller register takes several for one sum.
        rows, weights = (6, 4) if wide else (2, 2)
        name, flags, tiles = llvm.get_host_cpu_name(), features.flatten(), wide and _has_tiles(features)
        return cls(name, flags, fused=fused, vnni=vnni, pairs=pairs, tiles=tiles, tile_rows=rows, tile_weights=weights)


def _has_tiles(features: Mapping[str, bool]) -> bool:
    """Whether kernels may use AMX: the CPU has it, nobody has said no, and the system permits it to this process."""
    found = features.get("amx-tile", False) and features.get("amx-bf16", False)
    return found and os.environ.get(AMX, "").lower() not in _NO and may_use_tiles()


@functools.cache
def may_use_tiles() -> bool:
    """Ask the system to let this process use the tiles' registers, once; all threads may, if it may.

    Linux gives them only to who asks, as they make every switch of threads dearer. A process that runs compiled code
    must have asked, whoever compiled it.
    """
    if sys.platform != "linux" or not llvm.get_process_triple().startswith("x86_64"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def is_portable() -> bool:
    """Whether kernels must run on every CPU of this machine's kind."""
    return os.environ.get(PORTABLE, "").lower() not in ("", *_NO)


def num_threads() -> int:
    """Return how many threads compute: TREADLE_KERNELS_THREADS, or as many as this process may run on."""
    given = os.environ.get(THREADS, "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given:
        return min(available, MAX_THREADS)
    if not given.isdecimal() or not 1 <= int(given) <= MAX_THREADS:
        raise ValueError(f"{THREADS} must be a number from 1 to {MAX_THREADS}, but is {given!r:.40}")
    return int(given)
