"""Counter-based uniforms: a draw is a function of where it happens, so no generator state has to be kept.

A stream key is folded from (seed, choice index, absolute position, stage name, occurrence of that name in the chain);
draw number d of the stream is output d of SplitMix64 started at the key (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014). The upper 52 bits h of an output give (h + 0.5) / 2**52, which is never 0 and
never 1: a uniform of exactly 0 or 1 would turn into infinite noise or choose a token of probability 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, SplitMix64's increment
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's finaliser, "variant 13" of David Stafford
_FNV_BASIS, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a, 64 bits


def stage_key(name: str, occurrence: int = 0) -> int:
    """64-bit key of the `occurrence`-th stage called `name` in a chain (0 for the first)."""
    digest = _FNV_BASIS
    for byte in name.encode():
        digest = ((digest ^ byte) * _FNV_PRIME) & _MASK
    return _fold(digest, occurrence)


def stream_key(seed: int, choice_index: int, position: int, stage: int) -> int:
    """64-bit key of one stage's draws for one token; `stage` is its `stage_key`."""
    return _fold(_fold(_fold(_mix(seed & _MASK), choice_index), position), stage)


def uniform(key: int, draw: int) -> float:
    """Draw number `draw` (from 0) of the stream `key`, in the open interval (0, 1)."""
    return ((_mix(key + (draw + 1) * _GAMMA) >> 12) + 0.5) * 2.0**-52


def uniforms(key: int, first_draw: int, count: int) -> NDArray[np.float64]:
    """Draws `first_draw` and on of the stream `key`: [count] float64, equal to `uniform` one by one."""
    counters = np.arange(first_draw + 1, first_draw + 1 + count, dtype=np.uint64)
    z = counters * np.uint64(_GAMMA) + np.uint64(key)  # array arithmetic wraps at 2**64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _fold(key: int, value: int) -> int:
    return _mix(key + _GAMMA ^ (value & _MASK))


def _mix(value: int) -> int:
    z = value & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
