"""How threads share an operation: in chunks that whoever comes takes, and that nobody waits long for.

A step is a row of operations, numbered in ascending order for as long as the process runs. Each has chunks, whose
results are worked out in a thread's own memory and then committed: the first to say so writes them where the others
read. When every chunk is taken, a thread that has nothing to do waits a little and then works out an unfinished one
itself: whoever took it may have been stopped by the scheduler for milliseconds. Results have the same bits whoever
makes them, and what a late one makes is dropped. So a thread is waited for only while it copies a result, and a step
never waits for helpers to start.

Each thread is given chunks of a run of its own, as long as all are equally fast: what it fetches ahead of itself from
memory is then what it reads next.

`control` is `[CONTROL_SIZE] int64`: the operation and how many of its chunks are taken; the number of threads; and for
every chunk the last operation that was committed, and that is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treadle_kernels.memory import load_acquire, pause, replace_if, store_release

# Of one operation. Memory that no chunk needs is never touched, so that many cost nothing.
MAX_CHUNKS = 1 << 22
CONTROL_SIZE = 8 + 2 * MAX_CHUNKS

_TAKEN_BITS = 24
_TAKEN = (1 << _TAKEN_BITS) - 1
NUM_THREADS, _COMMITTED, _WRITTEN = 1, 8, 8 + MAX_CHUNKS
# Pauses of 20 to 40 ns until a thread does another's chunk over: longer than a chunk of a decoding step takes.
_PATIENCE = 1000


def new_control(num_threads: int) -> NDArray[np.int64]:
    """Return what so many threads agree by, before the first operation."""
    control = np.zeros(CONTROL_SIZE, np.int64)
    control[NUM_THREADS] = num_threads
    return control


@njit(nogil=True)
def _at(control, place):
    return np.int64(control.ctypes.data) + 8 * np.int64(place)


@njit(nogil=True)
def take_chunk(control, operation, num_chunks):
    """Return the number of a chunk to work out, or -1 once all chunks of the operation are written."""
    while True:
        word = load_acquire(_at(control, 0))
        current = word >> _TAKEN_BITS
        if current > operation:
            return -1
        taken = word & _TAKEN if current == operation else 0
        if taken >= num_chunks:
            return _unfinished(control, operation, num_chunks)
        if replace_if(_at(control, 0), word, (operation << _TAKEN_BITS) | (taken + 1)):
            return _spread(taken, num_chunks, control[NUM_THREADS])


@njit(nogil=True)
def _spread(taken, num_chunks, num_threads):
    """Return the chunk that comes as number `taken`: the first ones of as many runs as there are threads, and so on."""
    run = taken % num_threads
    return run * (num_chunks // num_threads) + min(run, num_chunks % num_threads) + taken // num_threads


@njit(nogil=True)
def _unfinished(control, operation, num_chunks):
    """Wait for chunks that others have; return one that takes long and is not being committed, or -1."""
    first, pauses = 0, 0
    while first < num_chunks:
        if load_acquire(_at(control, _WRITTEN + first)) >= operation:
            first += 1
        elif load_acquire(_at(control, 0)) >> _TAKEN_BITS > operation:
            return -1
        elif pauses > _PATIENCE and load_acquire(_at(control, _COMMITTED + first)) < operation:
            return first
        else:
            pauses += 1
            pause()
    return -1


@njit(nogil=True)
def begin_commit(control, operation, chunk):
    """Whether this thread is the one that writes the chunk's result; if so, `end_commit` has to follow."""
    seen = load_acquire(_at(control, _COMMITTED + chunk))
    return seen < operation and replace_if(_at(control, _COMMITTED + chunk), seen, operation)


@njit(nogil=True)
def end_commit(control, operation, chunk):
    """Let everybody see the chunk's result."""
    store_release(_at(control, _WRITTEN + chunk), operation)
