"""Rotary position embedding: the angle of every position and pair of dimensions, and the turn itself.

Angles are worked out in float64 whatever the model computes in. Where they depend on the length of a sequence, a token
takes those of the length its sequence had reached when it was read: the whole prompt's for a token of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import PositionsConfig, RotaryConfig

from treadle_server.model.ops import row_pieces

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Positions whose angles are kept, some MB: to work one out again costs a step of a small model a percent or two.
KEPT_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Rotary:
    """The angles of some layers, ready to use; `frequencies` `[half]` is None where they depend on the length."""

    config: RotaryConfig
    dim: int
    frequencies: Floats | None

    @classmethod
    def of(cls, config: RotaryConfig, head_dim: int) -> Rotary:
        """Work out the frequencies of heads of that width, once."""
        dim = config.dim or head_dim
        return cls(config, dim, None if config.depends_on_length else rotary_frequencies(config, dim))

    def table(self, positions: Integers, lengths: Integers, dtype: DTypeLike) -> tuple[Array, Array]:
        """Return cos and signed sin of tokens at `positions` whose sequences had reached `lengths`, `[rows] int64`."""
        frequencies = self.frequencies
        if frequencies is None:
            frequencies = rotary_frequencies(self.config, self.dim, lengths)
        elif max(positions.tolist(), default=0) < KEPT_POSITIONS:
            cos, signed_sin = _kept_table(self.config, self.dim, np.dtype(dtype))
            return cos[positions], signed_sin[positions]
        return rotary_table(frequencies, positions, dtype, self.config.attention_factor)

    def pairs(self, heads: Array) -> Array:
        """Return heads `[rows, heads, head_dim]` as `[rows, heads, 2, half]`: what turns, as a view."""
        turning = heads[..., : self.dim]
        if self.config.interleaved:
            return turning.reshape(*heads.shape[:2], -1, 2).swapaxes(2, 3)
        return turning.reshape(*heads.shape[:2], 2, -1)


@lru_cache(maxsize=8)
def _kept_table(config: RotaryConfig, dim: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return `rotary_table` of the first KEPT_POSITIONS, for frequencies that depend on nothing else."""
    frequencies = rotary_frequencies(config, dim)
    return rotary_table(frequencies, np.arange(KEPT_POSITIONS), dtype, config.attention_factor)


def angle_key(positions: PositionsConfig, length: int) -> tuple[int, ...]:
    """Return what a token's angles depend on beside its place: equal for lengths reached that have equal angles."""
    rotaries = dict.fromkeys((positions.rotary, *positions.layers))
    return tuple(_length_class(one, length) for one in rotaries if one is not None and one.depends_on_length)


def _length_class(rotary: RotaryConfig, length: int) -> int:
    if rotary.kind == "longrope":
        return int(length > rotary.original_context_length)
    return max(length, rotary.original_context_length)


def rotary_frequencies(rotary: RotaryConfig, dim: int, lengths: Integers | None = None) -> Floats:
    """Return the angle per position of each pair, `[dim / 2]`, or for lengths `[rows]` one row each, `[rows, dim / 2]`.

    Lengths count for the kinds that depend on them, and must be given for those.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    if rotary.kind == "dynamic" and lengths is not None:
        return _dynamic_theta(rotary, dim, lengths)[:, None] ** -exponents
    frequencies: Floats = rotary.theta**-exponents
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    if rotary.kind == "yarn":
        return _yarn_frequencies(rotary, frequencies)
    if rotary.kind == "llama3":
        return _llama3_frequencies(rotary, frequencies)
    if rotary.kind == "longrope" and lengths is not None:
        is_long = lengths[:, None] > rotary.original_context_length
        return frequencies / np.where(is_long, rotary.long_factors, rotary.short_factors)
    return frequencies


def _dynamic_theta(rotary: RotaryConfig, dim: int, lengths: Integers) -> Floats:
    """Return the base for each length `[rows]`: past the original context it grows, by the NTK-aware rule."""
    stretch = np.maximum(lengths, rotary.original_context_length) / rotary.original_context_length
    grown: Floats = rotary.theta * (rotary.factor * stretch - (rotary.factor - 1)) ** (dim / (dim - 2))
    return grown


def _yarn_frequencies(rotary: RotaryConfig, frequencies: Floats) -> Floats:
    """Pairs that turn often are left alone, those that turn little are stretched, between them a ramp (Peng 2023)."""
    dim = 2 * len(frequencies)

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair that makes so many turns within the original context."""
        wavelengths = math.log(rotary.original_context_length / (turns * 2 * math.pi))
        return dim * wavelengths / (2 * math.log(rotary.theta))

    low, high = pair_of(rotary.beta_fast), pair_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # The reference keeps the ramp from being a jump by this much.
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    blended: Floats = frequencies / rotary.factor * stretched + frequencies * (1 - stretched)
    return blended


def _llama3_frequencies(rotary: RotaryConfig, frequencies: Floats) -> Floats:
    """Slow pairs are stretched by the factor, fast ones left alone, those between blended (Llama 3.1)."""
    turns = rotary.original_context_length * frequencies / (2 * np.pi)  # turns within the original context
    smooth = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    blended: Floats = (1 - smooth) * frequencies / rotary.factor + smooth * frequencies
    return blended


def rotary_table(
    frequencies: Floats, positions: Integers, dtype: DTypeLike, attention_factor: float = 1.0
) -> tuple[Array, Array]:
    """Return cos `[rows, 1, 1, half]` and signed sin `[rows, 1, 2, half]` (minus for the first half) of positions."""
    angles = positions[:, None] * frequencies  # [rows, half]
    cos, sin = np.cos(angles), np.sin(angles)
    if attention_factor != 1.0:
        cos *= attention_factor
        sin *= attention_factor
    signed = np.empty((len(angles), 1, 2, angles.shape[1]), dtype)
    signed[:, 0, 0], signed[:, 0, 1] = -sin, sin
    return cos[:, None, None, :].astype(dtype), signed


def rotary_forward(x: Array, cos: Array, signed_sin: Array, out: Array | None = None) -> Array:
    """Turn each pair (x[..., 0, i], x[..., 1, i]) of x `[rows, heads, 2, half]`: (a cos - b sin, b cos + a sin)."""
    out = np.empty_like(x) if out is None else out
    for rows in row_pieces(x):
        swapped = x[rows, :, ::-1] * signed_sin[rows]  # [rows, heads, 2, half]
        np.multiply(x[rows], cos[rows], out=out[rows])
        out[rows] += swapped
    return out


def rotary_backward(dy: Array, cos: Array, signed_sin: Array, out: Array | None = None) -> Array:
    """Return dx of dy, both `[rows, heads, 2, half]`: the turn back, scaled as the turn was."""
    return rotary_forward(dy, cos, -signed_sin, out)
