"""Counter-based uniforms."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from treadle_plugin_api import SamplingContext, random

words = st.integers(0, 2**64 - 1)


def test_draws_are_pinned():
    """Part of the contract: a seed gives the same tokens in every later version."""
    key = random.stream_key(seed=7, choice_index=1, position=42, stage=random.stage_key("categorical"))
    assert key == 0x4BFE6AABC8562488
    assert [random.uniform(key, draw) for draw in range(3)] == [
        0.43503857851071037,
        0.35504243486990894,
        0.3095032946234425,
    ]


@given(words, st.integers(0, 2**40), st.integers(0, 50))
def test_vectorised_equals_one_by_one(key: int, first: int, count: int):
    """`uniforms` gives the very numbers of `uniform`."""
    assert random.uniforms(key, first, count).tolist() == [random.uniform(key, first + i) for i in range(count)]


@given(words, words)
def test_interval_is_open(key: int, draw: int):
    """Neither 0 nor 1 ever comes out."""
    assert 0.0 < random.uniform(key, draw) < 1.0


def test_extreme_hashes_stay_inside(monkeypatch):
    """The smallest and the largest hash map to numbers strictly between 0 and 1."""
    for word, expected in ((0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)):
        monkeypatch.setattr(random, "_mix", lambda _, word=word: word)
        assert random.uniform(0, 0) == expected


def test_every_coordinate_matters():
    """Seed, choice, position, stage name, occurrence and draw each change the number."""
    stage = random.stage_key("top")
    keys = {
        random.stream_key(1, 0, 5, stage),
        random.stream_key(2, 0, 5, stage),
        random.stream_key(1, 1, 5, stage),
        random.stream_key(1, 0, 6, stage),
        random.stream_key(1, 0, 5, random.stage_key("pot")),
        random.stream_key(1, 0, 5, random.stage_key("top", 1)),
        random.stream_key(0, 1, 5, stage),
        random.stream_key(5, 0, 1, stage),
    }
    assert len(keys) == 8


def test_uniforms_are_uniform():
    """100,000 draws over positions fill 100 bins evenly (chi-square, 99 degrees of freedom, p > 1e-4)."""
    stage = random.stage_key("categorical")
    draws = [random.uniform(random.stream_key(3, 0, position, stage), 0) for position in range(100_000)]
    counts = np.bincount((np.array(draws) * 100).astype(int), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 160


def context_at(prompt: list[int], output: list[int]) -> SamplingContext:
    """A context in the middle of a text."""
    context = SamplingContext(vocab_size=9, prompt_ids=prompt, output_ids=output, seed=11)
    context.enter(random.stage_key("categorical"))
    return context


def test_resending_the_output_continues_the_stream():
    """Prompt + output sent again as a prompt draws what the running request would have drawn."""
    assert context_at([1, 2], [3, 4]).uniform() == context_at([1, 2, 3, 4], []).uniform()


def test_context_draws_count_up_and_start_again():
    """One call of size n equals n calls; `enter` starts again from the first."""
    context = context_at([1], [])
    one_by_one = [context.uniform() for _ in range(4)]
    context.enter(random.stage_key("categorical"))
    together = [context.uniform(), *context.uniform((1, 3)).ravel()]
    assert together == one_by_one


def test_append_moves_position_and_history():
    """An appended token is seen in `output_ids` and `position`, beyond the first buffer too."""
    context = SamplingContext(vocab_size=9, prompt_ids=[1, 2])
    for token in range(200):
        context.append(token % 9)
    assert context.position == 202
    assert context.output_ids.tolist() == [token % 9 for token in range(200)]


def test_histories_are_read_only():
    """Neither prompt nor output ids can be written to."""
    context = context_at([1], [2])
    assert not context.prompt_ids.flags.writeable
    assert not context.output_ids.flags.writeable
    assert context.prompt_ids.dtype == context.output_ids.dtype == np.int64
