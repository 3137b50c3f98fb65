"""The fused forward pass: which decoders it fits, and what the compiled step is given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import QUANTISED_BITS, Array, Batch, CacheView
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_server.model.prepared import Layer, Linear, Mlp, PreparedDecoder

from treadle_kernels.attention import QUERY_ROWS, attend_floats
from treadle_kernels.chunks import MAX_CHUNKS
from treadle_kernels.machine import Machine
from treadle_kernels.products import BLOCK_ROWS, Kernels, packed_floats
from treadle_kernels.quantised_tiles import PANEL_ROWS
from treadle_kernels.step import OPERATIONS_A_LAYER, Model, Room, Tokens, step
from treadle_kernels.stored import StoredMatrix, address_of
from treadle_kernels.team import Team, Work

Integers = NDArray[np.int64]

# Rows of weights in a chunk, at most. A chunk of one row of x takes some microseconds: long beside what taking one
# costs, short beside an operation, at whose end threads wait for each other. Quantised rows are shorter; AMX is faster.
OUT_ROWS, UP_ROWS = 64 if Machine.of_host().tiles else 32, 64
QUANTISED_OUT_ROWS, QUANTISED_UP_ROWS = 96, 128
CHUNKS_A_THREAD = 3
# Query rows in a chunk read their keys once for all of them; with fewer, scores of long sequences stay in the cache.
MIN_QUERY_ROWS, CACHED_SCORES = 4, 1 << 17
NO_WINDOW = 1 << 40


def fits(prepared: PreparedDecoder) -> bool:
    """Whether a decoder is of the common kind.

    That is: RMS norms before each sublayer, and of each query and key or not, rotary positions in halves or none, plain
    scores with a window or without, silu with a gate, residuals one after the other, all matrices stored alike.
    """
    return _plain(prepared.config) and len({one.stored for one in _matrices(prepared)}) == 1


def _plain(config: DecoderConfig) -> bool:
    return (
        (config.norm.kind, config.norm.place, config.norm.scale, config.norm.bias) == ("rms", "pre", True, False)
        and (config.residual, config.residual_scale, config.residual_from_norm) == ("serial", 1.0, False)
        and (config.mlp.gated, config.mlp.activation, config.moe) == (True, "silu", None)
        and _attends_plainly(config)
    )


def _attends_plainly(config: DecoderConfig) -> bool:
    attention, positions = config.attention, config.positions
    rotaries = [positions.rotary_of(layer) for layer in range(config.num_layers)]
    return (
        attention.qk_norm in ("none", "head")
        and (attention.qk_norm_bias, attention.softcap, attention.clip_qkv) == (False, None, None)
        and attention.scale > 0
        and positions.kind in ("rotary", "none")
        and not any(rotary.interleaved for rotary in rotaries if rotary is not None)
        and len({rotary.dim for rotary in rotaries if rotary is not None}) <= 1
    )


def _matrices(prepared: PreparedDecoder) -> list[StoredMatrix]:
    mlps = [layer.mlp for layer in prepared.layers if isinstance(layer.mlp, Mlp)]
    linears = [layer.qkv for layer in prepared.layers] + [layer.out for layer in prepared.layers]
    linears += [mlp.up for mlp in mlps] + [mlp.down for mlp in mlps]
    return [linear.weight for linear in linears if isinstance(linear.weight, StoredMatrix)]


class Compiled(NamedTuple):
    """What the step calls.

    Attributes:
        kernels: by the format that matrices are stored in.
        kept: what caches keep beside matrices in each of those.
        attends: the addresses of attention by what caches keep.
    """

    kernels: Mapping[str, Kernels]
    kept: Mapping[str, np.dtype[Any]]
    attends: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """The addresses of a prepared decoder's parameters; valid as long as that one lives.

    Attributes:
        kept: how its caches keep keys and values.
    """

    config: DecoderConfig
    model: Model
    kept: np.dtype[Any]

    @classmethod
    def of(cls, prepared: PreparedDecoder, compiled: Compiled, num_threads: int = 1) -> FusedDecoder | None:
        """Lay out a decoder; None where the step does not fit it."""
        if not fits(prepared):
            return None
        config, stored = prepared.config, _matrices(prepared)[0].stored
        attention = config.attention
        is_quantised = stored in QUANTISED_BITS
        most = (QUANTISED_OUT_ROWS, QUANTISED_UP_ROWS) if is_quantised else (OUT_ROWS, UP_ROWS)
        kept = compiled.kept[stored]
        model = Model(
            kernels=compiled.kernels[stored],
            f32=compiled.kernels["float32"].multiply,
            attend=compiled.attends[kept.name],
            kept_bytes=kept.itemsize,
            layers=np.array([_layer_row(layer) for layer in prepared.layers], np.int64),
            final_norm=_address(None if prepared.final_norm is None else prepared.final_norm.weight),
            scales=np.array([layer.scoring.scale for layer in prepared.layers], np.float32),
            eps=np.float32(config.norm.eps),
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            half=prepared.rotaries[0].dim // 2 if prepared.rotaries else 0,
            out_rows=_chunk_rows(config.dim, most[0], num_threads),
            up_rows=_chunk_rows(config.mlp.hidden_dim, most[1], num_threads),
        )
        return cls(config, model, kept)

    def forward(
        self, team: Team, owner: object, batch: Batch, positions: Integers, caches: Sequence[CacheView], x: Array,
        tables: Sequence[tuple[Array, Array]],
    ) -> None:  # fmt: skip
        """Take x `[tokens, dim]` through all layers and the final norm, in place, and store keys and values.

        positions are the batch's; owner holds the weights.
        """
        rows = _rows(batch, positions)
        self._check(len(x))
        found = [_find_cache(cache, len(self.model.layers), self.kept) for cache in caches]
        sequences, kept = np.array([row for row, _ in found], np.int64), [owner, *(arrays for _, arrays in found)]
        blocks = _query_blocks(batch, self.config.attention.group_size)
        tokens = Tokens(rows, sequences, blocks, _angles(tables, len(x), self.model.half))
        self._take(team, tokens, x, kept)

    def _check(self, num_rows: int) -> None:
        """Raise ValueError for more rows than an operation has chunks for; that is some ten thousands."""
        model, config = self.model, self.config
        most = max(config.mlp.hidden_dim // model.up_rows, config.dim // model.out_rows)
        pieces = max(model.heads + 2 * model.kv_heads, most + 1)
        if max(pieces * (num_rows // BLOCK_ROWS + 1), num_rows * model.kv_heads) > MAX_CHUNKS:
            raise ValueError(f"a pass of {num_rows} tokens is too long for the compiled step: give it in pieces")

    def _take(self, team: Team, tokens: Tokens, x: Array, kept: list[object]) -> None:
        """Take the rows through every layer."""
        model, config, num_rows = self.model, self.config, len(x)
        q, heads = np.empty((2, num_rows, model.heads * model.head_dim), np.float32)
        room = Room(x, q, heads, np.empty((num_rows, config.mlp.hidden_dim), np.float32))
        size = _scratch_size(config, model, int(tokens.rows[:, 1].max()) + 1)
        scratch = team.scratch(size)

        def make(first: int) -> Work:
            # A late thread still reads weights and caches: they live as long as what it was given to do.
            return Work(lambda thread: step(model, tokens, room, team.control, first, scratch[thread]), kept)

        team.run(OPERATIONS_A_LAYER * config.num_layers + 1, make)


@dataclass(frozen=True, slots=True)
class KernelDecoder(PreparedDecoder):
    """A prepared decoder, laid out for the compiled step where that fits it."""

    fused: FusedDecoder | None = None

    @classmethod
    def of(cls, prepared: PreparedDecoder, compiled: Compiled, num_threads: int = 1) -> KernelDecoder:
        """Lay a decoder out."""
        values = {one.name: getattr(prepared, one.name) for one in fields(PreparedDecoder)}
        return cls(**values, fused=FusedDecoder.of(prepared, compiled, num_threads))


def _layer_row(layer: Layer) -> list[int]:
    """Return the columns of `step.Model.layers`."""
    if not isinstance(layer.mlp, Mlp):
        raise TypeError("a layer with experts has no place in the compiled step")
    norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    first, second, *heads = (_address(None if norm is None else norm.weight) for norm in norms)
    projections, (out, down) = _parts(layer.qkv), (_parts(layer.out), _parts(layer.mlp.down))
    ups = _parts(layer.mlp.up)
    window = layer.scoring.window or NO_WINDOW
    rotary = -1 if layer.rotary_id is None else layer.rotary_id
    return [first, *projections, *out, second, *ups, *down, window, rotary, *heads]


def _parts(linear: Linear) -> list[int]:
    """Return the addresses of the matrices that lie in one linear: of each the columns that `step` has."""
    matrix = linear.weight
    if not isinstance(matrix, StoredMatrix):
        raise TypeError(f"a matrix is {type(matrix).__name__}, not as this backend reads them")
    parts = []
    for start, _, numbers, stride in matrix.segments.tolist():
        parts += [numbers, stride, 0 if linear.bias is None else address_of(linear.bias) + 4 * start]
    return parts


def _address(array: Array | None) -> int:
    return 0 if array is None else address_of(array)


def _rows(batch: Batch, positions: Integers) -> Integers:
    """Return each new token's sequence and position, `[tokens, 2]`."""
    rows, numbers = np.empty((len(positions), 2), np.int64), np.arange(batch.num_sequences)
    rows[:, 0] = numbers if len(numbers) == len(rows) else np.repeat(numbers, np.diff(batch.starts))
    rows[:, 1] = positions
    return rows


def _angles(tables: Sequence[tuple[Array, Array]], num_rows: int, half: int) -> NDArray[np.float32]:
    """Return cosines and sines of each rotary, `[2 * rotaries, rows, half]`."""
    angles = np.empty((2 * len(tables), num_rows, half), np.float32)
    for number, (cos, signed_sin) in enumerate(tables):
        angles[2 * number], angles[2 * number + 1] = cos[:, 0, 0], signed_sin[:, 0, 1]
    return angles


def _chunk_rows(num_rows: int, most: int, num_threads: int) -> int:
    """Return rows of weights in a chunk: whole panels, and some chunks for every thread."""
    return max(PANEL_ROWS, min(most, num_rows // (CHUNKS_A_THREAD * num_threads) // PANEL_ROWS * PANEL_ROWS))


def _scratch_size(config: DecoderConfig, model: Model, length: int) -> int:
    """Return the floats that a thread needs beside the shared arrays."""
    attention = config.attention
    hidden = max(config.mlp.hidden_dim, attention.num_heads * attention.head_dim)
    normed = config.dim + packed_floats(config.dim) + max(attention.head_dim, 2 * model.up_rows)
    product = BLOCK_ROWS * max(normed, packed_floats(hidden) + model.out_rows)
    group = attention.group_size
    scores = max(MIN_QUERY_ROWS * group * length, min(QUERY_ROWS * group * length, CACHED_SCORES))
    room: int = max(product, attend_floats(QUERY_ROWS, group, attention.head_dim, 0) + scores)
    return room


def _query_blocks(batch: Batch, group: int) -> Integers:
    """Return first row and row behind the last of each run of rows of one sequence that attend at once, `[blocks, 2]`.

    group: heads that share a head of keys.
    """
    starts = batch.starts
    if batch.num_tokens == batch.num_sequences:
        single = np.empty((len(starts) - 1, 2), np.int64)  # three times as fast as to stack them
        single[:, 0], single[:, 1] = starts[:-1], starts[1:]
        return single
    blocks = []
    for (first, stop), prefix in zip(itertools.pairwise(starts.tolist()), batch.prefix_lengths.tolist(), strict=True):
        rows = _query_rows(group, prefix + stop - first)
        blocks += [(start, min(start + rows, stop)) for start in range(first, stop, rows)]
    return np.array(blocks, np.int64)


def _query_rows(group: int, length: int) -> int:
    """Return how many query rows of a sequence of so many tokens attend in one chunk."""
    return max(MIN_QUERY_ROWS, min(QUERY_ROWS, CACHED_SCORES // (group * length)))


def _find_cache(cache: CacheView, num_layers: int, kept: np.dtype[Any]) -> tuple[list[int], object]:
    """Return where a cache's keys and values lie, the columns of `step.Tokens.sequences`, and what keeps them there."""
    keys, values = cache.layer(0)
    if keys.dtype != kept:
        raise ValueError(f"a cache holds {keys.dtype}, but this decoder keeps keys and values in {kept}")
    start, stride = address_of(keys), 0
    if num_layers > 1:
        stride = address_of(cache.layer(1)[0]) - start
        last = address_of(cache.layer(num_layers - 1)[0])
        if last - start != stride * (num_layers - 1):
            raise ValueError("the layers of a cache must lie at equal distances")
    return [start, address_of(values), stride, keys.strides[0]], (keys, values)
