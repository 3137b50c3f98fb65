"""What one forward pass works on: its buffers, made once and used by every layer, and what watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray
from treadle_plugin_api.backend import Array, Batch, CacheView, Observer
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model.adapters import RowAdapters
from treadle_server.model.prepared import PreparedDecoder


@dataclass(slots=True)
class Pass:
    """What one forward pass works on. Views are made once here, not once a layer."""

    prepared: PreparedDecoder
    config: DecoderConfig
    batch: Batch
    caches: Sequence[CacheView]
    adapters: RowAdapters | None  # of the rows; None when nobody has one
    turns: tuple[tuple[Array, Array, Array], ...]  # a rotary's pairs of queries and keys in qkv, cos, signed sin
    x: Array  # [tokens, dim], the residual stream
    normed: Array  # [tokens, dim]
    delta: Array  # [tokens, dim], what a sublayer adds
    qkv: Array  # [tokens, (heads + 2 kv_heads) * head_dim]
    q: Array  # [tokens, kv_heads, group, head_dim], view of qkv
    k: Array  # [kv_heads, tokens, head_dim], view of qkv
    v: Array  # [kv_heads, tokens, head_dim], view of qkv
    heads: Array  # [tokens, heads * head_dim]
    up: Array  # [tokens, hidden or 2 * hidden]
    kept: dict[str, Array] | None = None  # what the backward pass needs of the layer that runs; None when there is none

    @classmethod
    def of(
        cls,
        prepared: PreparedDecoder,
        batch: Batch,
        caches: Sequence[CacheView],
        x: Array,
        tables: Sequence[tuple[Array, Array]],
    ) -> Pass:
        """Make the buffers for x `[tokens, dim]`, which is the first of them, and each rotary's cos and sin."""
        config, attention, tokens, dtype = prepared.config, prepared.config.attention, batch.num_tokens, x.dtype
        head_dim, kv_heads, num_heads = attention.head_dim, attention.num_kv_heads, attention.num_heads
        qkv = np.empty((tokens, num_heads + 2 * kv_heads, head_dim), dtype)
        turning = qkv[:, : num_heads + kv_heads]
        return cls(
            prepared=prepared,
            config=config,
            batch=batch,
            caches=caches,
            adapters=RowAdapters.of(batch.adapters, batch.starts),
            turns=tuple(
                (rotary.pairs(turning), *table) for rotary, table in zip(prepared.rotaries, tables, strict=True)
            ),
            x=x,
            normed=np.empty((tokens, config.dim), dtype),
            delta=np.empty((tokens, config.dim), dtype),
            qkv=qkv.reshape(tokens, -1),
            q=qkv[:, :num_heads].reshape(tokens, kv_heads, attention.group_size, head_dim),
            k=qkv[:, num_heads : num_heads + kv_heads].transpose(1, 0, 2),
            v=qkv[:, num_heads + kv_heads :].transpose(1, 0, 2),
            heads=np.empty((tokens, num_heads * head_dim), dtype),
            up=np.empty((tokens, config.mlp.hidden_dim * (2 if config.mlp.gated else 1)), dtype),
        )

    def keep(self, name: str, array: Array) -> None:
        """Copy an array for the backward pass: the buffers are written to again."""
        if self.kept is not None:
            self.kept[name] = array.copy()

    def to_keep(self, name: str, buffer: Array) -> Array:
        """Return the buffer, or an array in its place that is kept for the backward pass: to be written once."""
        if self.kept is not None:
            buffer = self.kept[name] = np.empty_like(buffer)
        return buffer


def rotary_tables(
    prepared: PreparedDecoder, batch: Batch, positions: NDArray[np.int64], dtype: DTypeLike
) -> list[tuple[Array, Array]]:
    """Return each rotary's cosines and signed sines of a batch's tokens at their positions."""
    lengths = batch.lengths_reached(positions) if prepared.config.positions.depends_on_length else positions
    return [rotary.table(positions, lengths, dtype) for rotary in prepared.rotaries]


def within(observe: Observer | None, prefix: str) -> Observer | None:
    """Return an observer that puts a prefix before every name."""
    return None if observe is None else lambda name, array: observe(prefix + name, array)


def show(observe: Observer | None, name: str, array: Array) -> None:
    """Hand the observer a copy: the buffer is written to again."""
    if observe is not None:
        observe(name, array.copy())


def show_qkv(observe: Observer | None, run: Pass, suffix: str) -> None:
    """Hand the observer queries, keys and, once, values, each `[heads, tokens, head_dim]`."""
    if observe is not None:
        heads = run.q.reshape(len(run.q), -1, run.q.shape[3]).transpose(1, 0, 2)
        observe(f"attention.q{suffix}", heads.copy())
        observe(f"attention.k{suffix}", run.k.copy())
        if not suffix:
            observe("attention.v", run.v.copy())
