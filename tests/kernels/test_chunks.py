"""Threads that share an operation: nobody is waited for, and nothing is written twice."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_server.model.prepared import Linear


def multiply_after(kernels, stalled: int):
    """Multiply while another thread has taken `stalled` chunks and sleeps; return result, expectation, which chunks."""
    from treadle_kernels.chunks import take_chunk
    from treadle_kernels.stored import StoredMatrix

    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((400, 30)).astype(np.float32), rng.standard_normal((3, 30)).astype(np.float32)
    linear, (expected, out) = Linear(StoredMatrix([weight]), None), np.zeros((2, 3, 400), np.float32)
    kernels.linear(x, linear, expected)
    team = kernels._team
    operation = team._operation
    taken = [take_chunk(team.control, operation, 13) for _ in range(stalled)]
    kernels.linear(x, linear, out)
    return out, expected, operation, taken


def test_a_thread_that_sleeps_is_not_waited_for(kernels):
    """Chunks that somebody took and never finished are made by those who are awake; the result has the same bits."""
    out, expected, _, taken = multiply_after(kernels, stalled=3)
    assert taken == [0, 7, 1]  # of 13, for two threads
    assert out.tobytes() == expected.tobytes()


def test_a_late_result_is_dropped(kernels):
    """Who wakes up when an operation is over may not write, and is told that there is nothing to do."""
    from treadle_kernels.chunks import begin_commit, take_chunk

    _, _, operation, _ = multiply_after(kernels, stalled=2)
    control = kernels._team.control
    assert not begin_commit(control, operation, 0)
    assert take_chunk(control, operation, 13) == -1


def test_each_chunk_is_committed_by_one(kernels):
    """Of two who made the same chunk the first commits."""
    from treadle_kernels.chunks import begin_commit, end_commit, new_control, take_chunk

    control = new_control(1)
    assert take_chunk(control, 5, 1) == 0
    assert begin_commit(control, 5, 0)
    assert not begin_commit(control, 5, 0)
    end_commit(control, 5, 0)
    assert take_chunk(control, 5, 1) == -1
    assert take_chunk(control, 6, 1) == 0


@settings(max_examples=40, deadline=None)
@given(num_threads=st.integers(1, 16), num_chunks=st.integers(1, 100))
def test_each_thread_is_given_a_run_of_chunks(kernels, num_threads, num_chunks):
    """All chunks are given out, each once; who takes every n-th of them gets neighbours."""
    from treadle_kernels.chunks import new_control, take_chunk

    control = new_control(num_threads)
    taken = [take_chunk(control, 1, num_chunks) for _ in range(num_chunks)]
    assert sorted(taken) == [*range(num_chunks)]
    for thread in range(num_threads):
        own = taken[thread::num_threads]
        assert own == [*range(own[0], own[0] + len(own))] if own else num_chunks < num_threads


def test_callers_take_turns(kernels):
    """Threads that multiply at the same time get their own results."""
    from treadle_kernels.stored import StoredMatrix

    rng = np.random.default_rng(1)
    weight = rng.standard_normal((300, 40)).astype(np.float32)
    xs = [rng.standard_normal((rows, 40)).astype(np.float32) for rows in (1, 5, 2, 9)]
    outs = [np.empty((len(x), 300), np.float32) for x in xs]
    linear = Linear(StoredMatrix([weight]), None)

    def call(number: int) -> None:
        for _ in range(20):
            kernels.linear(xs[number], linear, outs[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, out in zip(xs, outs, strict=True):
        np.testing.assert_allclose(out, x @ weight.T, atol=1e-4)
