"""Row by row through memory once: norms, rotary turns, gated silu, cross entropy and AdamW, and back.

Each function is one thread's and writes to nothing but what it is said to fill. Matrices are (address, row stride) in
bytes, rows are of floats that lie close.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from treadle_kernels.compiled import entry_point
from treadle_kernels.tiles import exp_row, largest_of_row
from treadle_kernels.training_row_tiles import (
    adamw_row,
    dot_row,
    gate_row,
    gate_slopes_row,
    norm_row,
    norm_slopes_row,
    scale_row,
    turn_row,
    weighted_dot_row,
)

# Numbers of an optimizer's arrays in a piece: what is read and written of it stays near.
PIECE = 1 << 14


@njit(nogil=True)
def _inverse(x, dim, eps):
    """Return 1 over the root of the mean square of x `[dim]`."""
    return np.float32(1.0) / np.sqrt(dot_row(x, x, dim) / np.float32(dim) + eps)


@entry_point
def rms_norm(x, weight, out, rows, dim, eps):
    """Fill out `[rows, dim]` with x / sqrt(mean(x^2) + eps) * weight; out may be x."""
    (source, stride), (target, target_stride) = x, out
    for _ in range(rows):
        norm_row(source, weight, _inverse(source, dim, eps), dim, target)
        source, target = source + stride, target + target_stride


@entry_point
def rms_norm_backward(x, weight, dy, dx, dweight, rows, dim, eps):
    """Fill dx `[rows, dim]`, which may be dy, and add to dweight `[dim]`, row by row."""
    (source, stride), (slope, slope_stride), (target, target_stride) = x, dy, dx
    for _ in range(rows):
        inverse = _inverse(source, dim, eps)
        along = weighted_dot_row(source, slope, weight, dim) / np.float32(dim)
        pull = inverse * inverse * inverse * along
        norm_slopes_row(source, weight, slope, inverse, pull, dim, target, dweight)
        source, slope, target = source + stride, slope + slope_stride, target + target_stride


@entry_point
def turn_heads(x, cos, sin, sign, rows, heads, head_bytes, half):
    """Turn the first 2 * half numbers of each head, halves against each other, in place; back with a sign of -1.

    cos and sin are `[rows, half]`; a head lies head_bytes after the one before it.
    """
    (at, stride), (cosines, cos_stride), (sines, sin_stride) = x, cos, sin
    for _ in range(rows):
        for head in range(heads):
            turn_row(at + head * head_bytes, cosines, sines, sign, half)
        at, cosines, sines = at + stride, cosines + cos_stride, sines + sin_stride


@entry_point
def gated_silu(up, out, rows, width):
    """Fill out `[rows, width]` with silu(gate) * up, given gate beside up `[rows, 2 * width]`."""
    (source, stride), (target, target_stride) = up, out
    for _ in range(rows):
        gate_row(source, source + 4 * width, width, target)
        source, target = source + stride, target + target_stride


@entry_point
def gated_silu_backward(up, dhidden, rows, width):
    """Put in the place of gate beside up `[rows, 2 * width]` their gradients, given dhidden `[rows, width]`."""
    (source, stride), (slope, slope_stride) = up, dhidden
    for _ in range(rows):
        gate_slopes_row(source, source + 4 * width, slope, width)
        source, slope = source + stride, slope + slope_stride


@entry_point
def softmax_rows(logits, tops, totals):
    """Put exp(logit - top) in the place of logits `[rows, vocab]`; fill tops and totals `[rows]` with max and sum."""
    for row in range(len(logits)):
        at, vocab = np.int64(logits[row].ctypes.data), logits.shape[1]
        tops[row] = largest_of_row(at, vocab)
        totals[row] = exp_row(at, vocab, np.float32(1.0), tops[row])


@entry_point
def scale_rows(x, factors, added):
    """Put x * factor + added in the place of x `[rows, width]`, given `[rows]` of each."""
    for row in range(len(x)):
        scale_row(np.int64(x[row].ctypes.data), x.shape[1], factors[row], added[row])


@entry_point
def adamw(arrays, count, constants):
    """Change a parameter and its moments; see `adamw_row`."""
    for start in range(0, count, PIECE):
        at = (arrays[0] + 4 * start, arrays[1] + 4 * start, arrays[2] + 4 * start, arrays[3] + 4 * start)
        adamw_row(at, min(PIECE, count - start), constants)
