"""All layers of a forward pass in one call, for decoders of the common kind; see `fused_forward.fits`.

A layer is five operations (see `chunks`): queries, keys and values with their rotation; attention; the output
projection; the gated feed-forward's hidden layer; its way back. What stands between them, norms above all, every thread
works out for itself, so that an operation's end is the only thing to wait for.

Shapes: rows are new tokens. The arrays of `Room` are shared between threads, `scratch` is a thread's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from treadle_kernels.attention import attend_by
from treadle_kernels.chunks import begin_commit, end_commit, take_chunk
from treadle_kernels.compiled import entry_point
from treadle_kernels.memory import floats_at, pointer
from treadle_kernels.products import BLOCK_ROWS, multiply_by, pack_by, packed_floats
from treadle_kernels.tiles import fetch, round_row, silu_gate

OPERATIONS_A_LAYER = 5

# Columns of `Model.layers`: addresses of the layer's parameters, 0 where there is none, and two numbers.
(NORM_1, QUERY, KEY, VALUE, OUT, NORM_2, GATE, UP, DOWN) = (0, 1, 4, 7, 10, 13, 14, 17, 20)
WINDOW, ROTARY, Q_NORM, K_NORM = 23, 24, 25, 26
# A matrix has three: its numbers, the bytes from row to row (or from panel to panel), the bias.
STRIDE, BIAS, MATRIX = 1, 2, 3
# Columns of `Tokens.sequences`: addresses of keys and values; how many bytes on the next layer is, and the next head.
KEYS, VALUES, LAYER_STRIDE, HEAD_STRIDE = range(4)


class Model(NamedTuple):
    """A decoder. Integers are int64.

    Attributes:
        kernels: for the format that matrices are stored in; f32: address of `multiply` for float32.
        attend: address of `attention.make_attend` for keys and values of kept_bytes a number.
        layers: `[layers, 27]`, columns as above; final_norm: an address, or 0.
        scales: `[layers] float32`, what attention's scores are multiplied by.
        half: pairs of a head that turn.
        out_rows: rows of weights in a chunk of a product that is added to the residual stream; up_rows: in one of the
            hidden layer.
    """

    kernels: Any
    f32: Any
    attend: Any
    kept_bytes: Any
    layers: Any
    final_norm: Any
    scales: Any
    eps: Any
    heads: Any
    kv_heads: Any
    head_dim: Any
    half: Any
    out_rows: Any
    up_rows: Any


class Tokens(NamedTuple):
    """The rows of a pass.

    Attributes:
        rows: `[rows, 2] int64`, sequence and position.
        sequences: `[sequences, 4] int64`, columns as above.
        blocks: `[blocks, 2] int64`, first row and row behind the last of those that attend in one chunk.
        tables: `[2 * rotaries, rows, half] float32`, cosines and sines.
    """

    rows: Any
    sequences: Any
    blocks: Any
    tables: Any


class Room(NamedTuple):
    """What all threads read and commit to: x `[rows, dim]`, the residual stream, and others `[rows, width]`."""

    x: Any
    q: Any
    heads: Any
    hidden: Any


@njit(nogil=True)
def _address(array):
    return np.int64(array.ctypes.data)


@njit(nogil=True)
def _product(f32, weight, stride, count, x, num_x, k, out):
    """Fill `[num_x, count]` at out with `[num_x, k]` at x times `count` rows `[k]` at weight, turned; all float32."""
    multiply_by(f32, (weight, stride, 0, count, x, 4 * k, num_x, k, out, 4 * count))


@njit(nogil=True)
def _stored_product(model, layer, matrix, row, count, packed, num_x, k, out):
    """Fill `[num_x, count]` at out with x times rows of a layer's matrix, turned, plus its bias.

    packed is the address of x `[num_x, k]`, and the bytes of a row of it, as `pack` left them.
    """
    source = (layer[matrix], layer[matrix + STRIDE], row, count)
    multiply_by(model.kernels.multiply, (*source, packed[0], packed[1], num_x, k, out, 4 * count))
    if layer[matrix + BIAS] != 0:
        made = carray(pointer(np.int64(out)), (num_x, count), np.float32)
        made += floats_at(layer[matrix + BIAS] + 4 * row, count)


@njit(nogil=True)
def _pack(model, x, packed):
    """Pack rows x `[rows, k]` at an address; return that and the bytes of a packed row."""
    return packed, pack_by(model.kernels.pack, (_address(x), 4 * x.shape[1], len(x), x.shape[1], packed))


@njit(nogil=True)
def _num_chunks(num_rows, pieces):
    return pieces * ((num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS)


@njit(nogil=True)
def _norm(f32, x, weight, eps, out):
    """Fill out `[rows, dim]` with x / sqrt(mean(x^2) + eps) * weight."""
    rows, dim = x.shape
    square, scale = np.empty(1, np.float32), floats_at(weight, dim)
    for row in range(rows):
        _product(f32, _address(x[row]), 0, 1, _address(x[row]), 1, dim, _address(square))
        factor = np.float32(1.0) / np.sqrt(square[0] / np.float32(dim) + eps)
        for column in range(dim):
            out[row, column] = x[row, column] * factor * scale[column]


@njit(nogil=True)
def _pack_normed(model, x, weight, normed, packed):
    """Pack x `[rows, dim]` normalised; normed `[BLOCK_ROWS, dim]` is room."""
    _norm(model.f32, x, weight, model.eps, normed)
    return _pack(model, normed[: len(x)], packed)


@njit(nogil=True)
def _turn(made, cos, sin, half):
    """Turn made `[rows, head_dim]`, halves against each other, by cos and sin `[rows, half]`, in place."""
    for row in range(len(made)):
        for i in range(half):
            a, b = made[row, i], made[row, half + i]
            made[row, i] = a * cos[row, i] - b * sin[row, i]
            made[row, half + i] = b * cos[row, i] + a * sin[row, i]


@njit(nogil=True)
def _cached(sequence, index, which, head):
    """Return the address of a layer's keys or values of one head."""
    return sequence[which] + index * sequence[LAYER_STRIDE] + head * sequence[HEAD_STRIDE]


@njit(nogil=True)
def _which_head(model, head):
    """Return what the head of a fused projection is, QUERY, KEY or VALUE, and its number among those."""
    if head < model.heads:
        return QUERY, head
    if head < model.heads + model.kv_heads:
        return KEY, head - model.heads
    return VALUE, head - model.heads - model.kv_heads


@njit(nogil=True)
def _place(model, tokens, index, kind, number, row):
    """Return where a row's keys or values of one head belong."""
    sequence, position = tokens.rows[row, 0], tokens.rows[row, 1]
    base = _cached(tokens.sequences[sequence], index, KEYS if kind == KEY else VALUES, number)
    return base + model.kept_bytes * position * model.head_dim


@njit(nogil=True)
def _store_head(model, tokens, room, index, kind, number, start, made):
    """Write made `[rows, head_dim]` to the queries, or to the caches of its rows' sequences."""
    if kind == QUERY:
        room.q[start : start + len(made), number * model.head_dim : (number + 1) * model.head_dim] = made
        return
    for row in range(len(made)):
        place = _place(model, tokens, index, kind, number, start + row)
        if model.kept_bytes == 4:
            floats_at(place, model.head_dim)[:] = made[row]
        else:
            round_row(_address(made[row]), model.head_dim, place)


@njit(nogil=True)
def _fetch_places(model, tokens, index, kind, number, start, stop):
    """Have the places that rows will be written to brought near meanwhile: each is somewhere else."""
    for row in range(start, stop):
        fetch(_place(model, tokens, index, kind, number, row), model.kept_bytes * model.head_dim)


@njit(nogil=True)
def _split(scratch, dim):
    """Return a thread's room for a block of normalised rows, the address of that for packed ones, and the rest."""
    behind = BLOCK_ROWS * dim
    packed = scratch[behind : behind + BLOCK_ROWS * packed_floats(dim)]
    return scratch[:behind].reshape(BLOCK_ROWS, dim), _address(packed), scratch[behind + len(packed) :]


@njit(nogil=True)
def _project_heads(model, tokens, room, index, control, operation, scratch):
    """A chunk is one head, of queries, keys or values, for a block of rows; keys and values go to their caches."""
    (num_rows, dim), head_dim, layer = room.x.shape, model.head_dim, model.layers[index]
    normed, room_for_x, made = _split(scratch, dim)
    pieces, current, packed = model.heads + 2 * model.kv_heads, -1, (room_for_x, 0)
    while True:
        chunk = take_chunk(control, operation, _num_chunks(num_rows, pieces))
        if chunk < 0:
            return
        start = (chunk // pieces) * BLOCK_ROWS
        stop = min(start + BLOCK_ROWS, num_rows)
        if start != current:
            packed = _pack_normed(model, room.x[start:stop], layer[NORM_1], normed, room_for_x)
            current = start
        kind, number = _which_head(model, chunk % pieces)
        first = number * head_dim
        if kind != QUERY:
            _fetch_places(model, tokens, index, kind, number, start, stop)
        _stored_product(model, layer, kind, first, head_dim, packed, stop - start, dim, _address(made))
        result = made[: (stop - start) * head_dim].reshape(stop - start, head_dim)
        scale = 0 if kind == VALUE else layer[Q_NORM if kind == QUERY else K_NORM]
        if scale != 0:
            _norm(model.f32, result, scale, model.eps, result)
        if kind != VALUE and layer[ROTARY] >= 0:
            cos, sin = tokens.tables[2 * layer[ROTARY], start:stop], tokens.tables[2 * layer[ROTARY] + 1, start:stop]
            _turn(result, cos, sin, model.half)
        if begin_commit(control, operation, chunk):
            _store_head(model, tokens, room, index, kind, number, start, result)
            end_commit(control, operation, chunk)


@njit(nogil=True)
def _keys_of(model, tokens, index, chunk):
    """Return the address of the keys that a chunk of `_attend` sees."""
    sequence = tokens.rows[tokens.blocks[chunk // model.kv_heads, 0], 0]
    return _cached(tokens.sequences[sequence], index, KEYS, chunk % model.kv_heads)


@njit(nogil=True)
def _attend(model, tokens, room, index, control, operation, scratch):
    """A chunk is a block of query rows of one sequence and the heads that share a key head."""
    group, num_chunks = model.heads // model.kv_heads, len(tokens.blocks) * model.kv_heads
    width, scale = group * model.head_dim, _address(model.scales[index:])
    while True:
        chunk = take_chunk(control, operation, num_chunks)
        if chunk < 0:
            return
        block, kv_head = tokens.blocks[chunk // model.kv_heads], chunk % model.kv_heads
        start, stop, first = block[0], block[1], kv_head * width
        sequence = tokens.sequences[tokens.rows[start, 0]]
        what = tokens.rows[start, 1], stop - start, group, model.head_dim, model.layers[index, WINDOW], scale
        queries = _address(room.q[start:, first:]), room.q.strides[0]
        keys, values = _keys_of(model, tokens, index, chunk), _cached(sequence, index, VALUES, kv_head)
        next_keys = _keys_of(model, tokens, index, min(chunk + 1, num_chunks - 1))
        attend_by(model.attend, (*what, *queries, keys, values, next_keys, _address(scratch)))
        if begin_commit(control, operation, chunk):
            made = scratch[: (stop - start) * width].reshape(stop - start, width)
            room.heads[start:stop, first : first + width] = made
            end_commit(control, operation, chunk)


@njit(nogil=True)
def _add_product(model, index, matrix, source, x, control, operation, scratch):
    """Add source `[rows, k]` times a matrix `[dim, k]` of a layer, turned, to x `[rows, dim]`."""
    (num_rows, k), dim, piece_rows = source.shape, x.shape[1], model.out_rows
    pieces, layer = (dim + piece_rows - 1) // piece_rows, model.layers[index]
    room_for_x, rest = _address(scratch), scratch[BLOCK_ROWS * packed_floats(k) :]
    current, packed = -1, (room_for_x, 0)
    while True:
        chunk = take_chunk(control, operation, _num_chunks(num_rows, pieces))
        if chunk < 0:
            return
        start, column = (chunk // pieces) * BLOCK_ROWS, (chunk % pieces) * piece_rows
        num_x, count = min(BLOCK_ROWS, num_rows - start), min(piece_rows, dim - column)
        if start != current:
            packed, current = _pack(model, source[start : start + num_x], room_for_x), start
        _stored_product(model, layer, matrix, column, count, packed, num_x, k, _address(rest))
        made = rest[: num_x * count].reshape(num_x, count)
        if begin_commit(control, operation, chunk):
            x[start : start + num_x, column : column + count] += made
            end_commit(control, operation, chunk)


@njit(nogil=True)
def _expand(model, room, index, control, operation, scratch):
    """Fill hidden with silu(gate) * up of the normalised residual stream."""
    (num_rows, dim), hidden_dim, piece_rows = room.x.shape, room.hidden.shape[1], model.up_rows
    normed, room_for_x, rest = _split(scratch, dim)
    pair, layer = rest[: 2 * BLOCK_ROWS * piece_rows].reshape(2, BLOCK_ROWS * piece_rows), model.layers[index]
    pieces, current, packed = (hidden_dim + piece_rows - 1) // piece_rows, -1, (room_for_x, 0)
    while True:
        chunk = take_chunk(control, operation, _num_chunks(num_rows, pieces))
        if chunk < 0:
            return
        start, column = (chunk // pieces) * BLOCK_ROWS, (chunk % pieces) * piece_rows
        num_x, count = min(BLOCK_ROWS, num_rows - start), min(piece_rows, hidden_dim - column)
        if start != current:
            packed = _pack_normed(model, room.x[start : start + num_x], layer[NORM_2], normed, room_for_x)
            current = start
        for half in range(2):
            made = _address(pair[half])
            _stored_product(model, layer, GATE + half * MATRIX, column, count, packed, num_x, dim, made)
        silu_gate(_address(pair[0]), _address(pair[1]), num_x * count, _address(pair[0]))
        if begin_commit(control, operation, chunk):
            room.hidden[start : start + num_x, column : column + count] = pair[0, : num_x * count].reshape(num_x, count)
            end_commit(control, operation, chunk)


@njit(nogil=True)
def _norm_rows(model, x, control, operation, scratch):
    """Normalise x `[rows, dim]` in place by the final norm."""
    num_rows, dim = x.shape
    made = scratch[: BLOCK_ROWS * dim].reshape(BLOCK_ROWS, dim)
    while True:
        chunk = take_chunk(control, operation, _num_chunks(num_rows, 1))
        if chunk < 0:
            return
        start, stop = chunk * BLOCK_ROWS, min((chunk + 1) * BLOCK_ROWS, num_rows)
        _norm(model.f32, x[start:stop], model.final_norm, model.eps, made)
        if begin_commit(control, operation, chunk):
            x[start:stop] = made[: stop - start]
            end_commit(control, operation, chunk)


@entry_point
def step(model, tokens, room, control, operation, scratch):
    """Take the residual stream through every layer and the final norm, in place. All threads call it at once.

    operation: the number of the first operation.
    """
    for index in range(len(model.layers)):
        _project_heads(model, tokens, room, index, control, operation, scratch)
        _attend(model, tokens, room, index, control, operation + 1, scratch)
        _add_product(model, index, OUT, room.heads, room.x, control, operation + 2, scratch)
        _expand(model, room, index, control, operation + 3, scratch)
        _add_product(model, index, DOWN, room.hidden, room.x, control, operation + 4, scratch)
        operation += OPERATIONS_A_LAYER
    if model.final_norm != 0:
        _norm_rows(model, room.x, control, operation, scratch)
