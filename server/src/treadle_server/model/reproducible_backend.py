"""The NumPy backend in reproducible mode."""

from __future__ import annotations

import numpy as np
from treadle_plugin_api.backend import Array, Observer

from treadle_server.model import ops
from treadle_server.model.attention import Scoring, attention_forward, reproducible_attention_forward
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.model.prepared import Linear

# Rows multiplied at once in reproducible mode. A multiple of every OpenBLAS micro-kernel's width, so that no row of a
# tile meets an edge kernel, whatever the machine.
TILE_ROWS = 16


class ReproducibleNumpyBackend(NumpyBackend):
    """A row's result never depends, not in one bit, on what else is in the batch or on how a prompt was cut."""

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` by products of one shape: tiles of TILE_ROWS rows, the last one padded with zeros."""
        rows = len(x)
        whole = rows - rows % TILE_ROWS
        for start in range(0, whole, TILE_ROWS):
            ops.linear_forward(x[start : start + TILE_ROWS], linear.weight, linear.bias, out[start : start + TILE_ROWS])
        if whole < rows:
            tile = np.zeros((TILE_ROWS, x.shape[1]), x.dtype)
            tile[: rows - whole] = x[whole:]
            out[whole:] = ops.linear_forward(tile, linear.weight, linear.bias)[: rows - whole]
        return out

    def attention(
        self, q: Array, keys: Array, values: Array, length: int, scoring: Scoring, out: Array, observe: Observer | None
    ) -> None:
        """Attend per query row over blocks of keys at absolute positions; an observed pass runs in fast mode."""
        if observe is not None:
            attention_forward(q, keys, values, length, scoring, out, observe)
        else:
            reproducible_attention_forward(q, keys, values, length, scoring, out)
