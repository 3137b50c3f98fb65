"""Adapters in a batch: whose rows get which low-rank change of which product (Hu et al. 2021).

Rows are grouped by adapter, so one forward pass serves any mix of them, and rows without one cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Adapter, Array, LowRank
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.parameters import Shape, param_shapes

from treadle_server.model.ops import linear_forward
from treadle_server.model.prepared import Linear

Rows = slice | NDArray[np.int64]

_ADAPTABLE = re.compile(r"layers\.\d+\.(attention\.[qkvo]|mlp\.(experts\.\d+\.|shared\.)?(gate|up|down))\.weight")


def adaptable(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes `(out, in)` of the canonical parameters that an adapter can change.

    They are the projections of attention and of every feed-forward, experts' included; embeddings, heads, routers,
    gates of shared experts, norms and biases are not among them.
    """
    return {name: shape for name, shape in param_shapes(config).items() if _ADAPTABLE.fullmatch(name)}


def lora_arrays(adapter: Adapter) -> dict[str, Array]:
    """Return an adapter's arrays by the names of their gradients, such as `layers.0.attention.q.lora_A`."""
    arrays: dict[str, Array] = {}
    for name, delta in adapter.deltas.items():
        stem = name.removesuffix(".weight")
        arrays |= {f"{stem}.lora_A": delta.a, f"{stem}.lora_B": delta.b}
    return arrays


def check_adapter(config: DecoderConfig, dtype: DTypeLike, adapter: Adapter) -> None:
    """Raise ValueError, naming the parameter, unless every change fits the decoder."""
    shapes = adaptable(config)
    for name, delta in adapter.deltas.items():
        if name not in shapes:
            raise ValueError(f"adapter {adapter.name!r} changes {name}, which is no matrix that an adapter can change")
        rank, (rows, columns) = len(delta.a), shapes[name]
        if not rank or delta.a.shape != (rank, columns) or delta.b.shape != (rows, rank):
            raise ValueError(
                f"adapter {adapter.name!r}: {name} needs a [rank, {columns}] and b [{rows}, rank], "
                f"but has a {list(delta.a.shape)} and b {list(delta.b.shape)}"
            )
        if {delta.a.dtype, delta.b.dtype} != {np.dtype(dtype)}:
            raise ValueError(f"adapter {adapter.name!r}: {name} must be {np.dtype(dtype)}, but is {delta.a.dtype}")


@dataclass(frozen=True, slots=True)
class Delta:
    """One adapter's change of one product: the rows that have it, and the columns of the part that it changes."""

    name: str  # of the part: the canonical parameter without `.weight`
    rows: Rows
    columns: slice
    low_rank: LowRank


class RowAdapters:
    """The adapter of each row of an array.

    Attributes:
        adapters: the different ones.
        ids: `[rows] int64`, which of them a row has; -1 for none.
    """

    def __init__(self, adapters: Sequence[Adapter], ids: NDArray[np.int64]) -> None:
        self.adapters = adapters
        self.ids = ids
        found = ((adapter, _places(ids == number)) for number, adapter in enumerate(adapters))
        self._groups = [(adapter, rows) for adapter, rows in found if rows is not None]

    @classmethod
    def of(cls, adapters: Sequence[Adapter | None] | None, starts: NDArray[np.int64]) -> RowAdapters | None:
        """Return those of a batch's rows, given its sequences' and where they start; None when nobody has one."""
        if adapters is None:
            return None
        distinct = tuple(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        of_sequences = [-1 if adapter is None else distinct.index(adapter) for adapter in adapters]
        return cls(distinct, np.repeat(np.asarray(of_sequences, np.int64), np.diff(starts)))

    def at(self, rows: Rows) -> RowAdapters:
        """Return those of some of the rows."""
        return RowAdapters(self.adapters, self.ids[rows])

    def deltas(self, linear: Linear) -> Iterator[Delta]:
        """Yield what is added to a product with a matrix, part by part."""
        for adapter, rows in self._groups:
            for name, columns in linear.parts.items():
                low_rank = adapter.deltas.get(f"{name}.weight")
                if low_rank is not None:
                    yield Delta(name, rows, columns, low_rank)


def _places(chosen: NDArray[np.bool_]) -> Rows | None:
    """Return where chosen is true, as a slice if it can be: a slice is not copied."""
    places = np.flatnonzero(chosen)
    if not len(places):
        return None
    first, stop = int(places[0]), int(places[-1]) + 1
    return slice(first, stop) if stop - first == len(places) else places


def low_rank_forward(x: Array, low_rank: LowRank) -> Array:
    """Return scale * (x @ a.T) @ b.T `[rows, out]` of x `[rows, in]`."""
    narrow = linear_forward(x, low_rank.a)  # [rows, rank]
    narrow *= low_rank.scale
    return linear_forward(narrow, low_rank.b)


def low_rank_backward(x: Array, low_rank: LowRank, dy: Array, share: Array | None = None) -> tuple[Array, Array, Array]:
    """Return dx `[rows, in]`, da and db of dy `[rows, out]`, y = scale * (x @ a.T) @ b.T.

    With share `[rows, 1]` the parameters' gradients are those of dy * share, while dx stays that of dy.
    """
    dnarrow = np.matmul(dy, low_rank.b)  # [rows, rank]
    dnarrow *= low_rank.scale
    dx = np.matmul(dnarrow, low_rank.a)
    narrow = np.matmul(x, low_rank.a.T)
    narrow *= low_rank.scale
    if share is not None:
        dnarrow *= share
        narrow *= share
    return dx, np.matmul(dnarrow.T, x), np.matmul(dy.T, narrow)
