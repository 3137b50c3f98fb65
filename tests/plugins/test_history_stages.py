"""Masks and penalties that act on given tokens or look back at the text: hand values and edges."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_plugin_api import SamplingContext, Stage
from treadle_plugin_api.testing import sample_context, sample_model_info
from treadle_samplers import AllowedTokenIds, BadWords, Dry, LogitBias, NoRepeatNgram, Penalties, SuppressTokens
from treadle_samplers.history import SuffixMatches, last_ids

INF = np.inf
SIZE = 12
LETTERS = sample_context(SIZE).token_bytes  # 1 is a, 2 is b, ...


def after(stage: Stage, logits: Sequence[float], prompt: Sequence[int] = (), output: Sequence[int] = ()) -> list[float]:
    """The row after the stage, checked and started, whose output came token by token."""
    row = np.array(logits, dtype=np.float32)
    stage.check(sample_model_info(len(row)))
    context = SamplingContext(vocab_size=len(row), prompt_ids=prompt, token_bytes=LETTERS)
    state = stage.start(context)
    for token_id in output:
        stage.accept(state, token_id)
        context.append(token_id)
    return stage.apply(row, context, state).tolist()


def banned(stage: Stage, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> list[int]:
    """Ids that the stage masks in a row of zeros."""
    return [i for i, value in enumerate(after(stage, [0.0] * SIZE, prompt, output)) if value == -INF]


def penalised(stage: Stage, prompt: Sequence[int], output: Sequence[int] = ()) -> dict[int, float]:
    """What the stage takes off a row of zeros, by id."""
    row = after(stage, [0.0] * SIZE, prompt, output)
    return {i: -value for i, value in enumerate(row) if value}


# Penalties.


def test_penalties_by_hand():
    """Repetition over prompt and output, once a token, by sign; then frequency and presence over the output."""
    stage = Penalties(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    row = after(stage, [2, -1, 0.5, 0, 3, -INF], prompt=[0, 1, 1, 5], output=[2, 2, 0])
    assert row == [1 - 0.75, -2, 0.25 - 1.25, 0, 3, -INF]


def test_presence_and_frequency_leave_the_prompt_alone():
    """A token of the prompt costs nothing until it is in the output."""
    stage = Penalties(presence_penalty=1.0, frequency_penalty=1.0)
    assert after(stage, [5, 5], prompt=[0, 0, 0]) == [5, 5]
    assert after(stage, [5, 5], prompt=[0, 0, 0], output=[0]) == [3, 5]


def test_negative_penalties_reward():
    """Below their neutral value they make repetition likelier."""
    assert after(Penalties(repetition_penalty=0.5, presence_penalty=-1.0), [1, -1, 1], output=[0, 1]) == [3, 0.5, 1]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_repetition_penalty_makes_no_infinity(penalty: float):
    """However extreme, every logit stays finite."""
    assert np.isfinite(after(Penalties(repetition_penalty=penalty), [3, -3, 0], prompt=[0, 1, 2])).all()


# Repeated passages.

words = st.lists(st.integers(0, 2), max_size=40)


def matches(history: list[int]) -> list[int]:
    """The definition of SuffixMatches, place by place."""

    def length(place: int) -> int:
        size = 0
        while size <= place and history[place - size] == history[len(history) - 1 - size]:
            size += 1
        return size

    return [length(place) for place in range(len(history) - 1)]


@given(words, words)
def test_suffix_matches(prompt: list[int], output: list[int]):
    """Built at once, grown token by token, or copied on the way: always the definition."""
    grown = SuffixMatches(prompt)
    for token_id in output:
        kept = grown.copy()
        grown.append(token_id)
        kept.append(9)
        assert kept.lengths.tolist() == [0] * (len(grown.ids) - 1)
    assert grown.ids.tolist() == prompt + output
    assert grown.lengths.tolist() == matches(prompt + output)
    assert SuffixMatches(prompt + output).lengths.tolist() == matches(prompt + output)


@given(words, words, st.integers(0, 50))
def test_last_ids(prompt: list[int], output: list[int], count: int):
    """The end of prompt and output together."""
    context = SamplingContext(vocab_size=3, prompt_ids=prompt, output_ids=output)
    assert last_ids(context, count) == (prompt + output)[max(len(prompt + output) - count, 0) :]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Dry(dry_sequence_breakers=()), {4: 0.8 * 1.75}),  # 1 2 3 again: length 3, one over the allowed 2
        (Dry(dry_multiplier=2.0, dry_base=3.0, dry_allowed_length=1, dry_sequence_breakers=()), {4: 18.0}),
        (Dry(dry_allowed_length=3, dry_sequence_breakers=()), {4: 0.8}),
        (Dry(dry_allowed_length=4, dry_sequence_breakers=()), {}),
        (Dry(dry_base=1.0, dry_sequence_breakers=()), {4: 0.8}),
        (Dry(dry_sequence_breakers=("b",)), {}),  # 3 alone is after the breaker
        (Dry(dry_allowed_length=1, dry_sequence_breakers=("b",)), {4: 0.8}),
        (Dry(dry_allowed_length=1, dry_sequence_breakers=("bc",)), {}),  # ends with the breaker
        (Dry(dry_sequence_breakers=("ab",), dry_allowed_length=1), {4: 0.8}),
        (Dry(dry_sequence_breakers=("d",)), {}),  # a breaker is never penalised
        (Dry(dry_sequence_breakers=(), dry_sequence_breaker_ids=(1,)), {4: 0.8}),  # 2 3 are after it
        (Dry(dry_sequence_breakers=(), dry_sequence_breaker_ids=(4,)), {}),
    ],
    ids=repr,
)
def test_dry_by_hand(stage: Dry, expected: dict[int, float]):
    """After 1 2 3 4 1 2 3, spelt a b c d a b c, the passage wants to go on with 4."""
    assert penalised(stage, [1, 2, 3, 4, 1, 2, 3]) == pytest.approx(expected)
    assert penalised(stage, [1, 2], [3, 4, 1, 2, 3]) == pytest.approx(expected)


def test_dry_finds_a_breaker_across_tokens_without_bytes():
    """Tokens that spell nothing do not hide the part of a breaker before them."""
    stage = Dry(dry_allowed_length=1, dry_sequence_breakers=("bc",))
    assert penalised(stage, [2, 0, 0, 0, 3, 4, 2, 0, 0, 0, 3]) == {}


def test_dry_takes_the_longest_match():
    """Of two places with one follower the longer match counts; another follower has its own."""
    stage = Dry(dry_allowed_length=1, dry_sequence_breakers=())
    assert penalised(stage, [1, 2, 7, 3, 2, 7, 5, 2, 8, 1, 2]) == pytest.approx({7: 0.8 * 1.75, 8: 0.8})


def test_dry_clamps_the_exponent():
    """A passage of a thousand tokens costs what float32 can hold, and masks nothing."""
    (penalty,) = penalised(Dry(dry_sequence_breakers=()), [1] * 1000).values()
    assert penalty == pytest.approx(0.8 * np.exp(88.7), rel=1e-4)
    assert np.isfinite(after(Dry(dry_multiplier=1000.0, dry_sequence_breakers=()), [0.0] * SIZE, [1] * 1000)).all()


def test_dry_leaves_masked_tokens_masked():
    """A penalty on -inf is no number's business."""
    assert after(Dry(dry_sequence_breakers=()), [-INF, 0, 0], [1, 2, 0, 1, 2]) == [-INF, 0, 0]


@pytest.mark.parametrize(("size", "expected"), [(1, [1, 2, 3]), (2, [2]), (3, [2]), (4, []), (5, []), (2**31 - 1, [])])
def test_no_repeat_ngram_by_hand(size: int, expected: list[int]):
    """After 3 1 2 3 1: bigram 1 2 and trigram 3 1 2 are taken."""
    assert banned(NoRepeatNgram(no_repeat_ngram_size=size), [3, 1, 2], [3, 1]) == expected


def test_no_repeat_ngram_leaves_a_token():
    """Where everything would repeat, repeating is allowed."""
    assert after(NoRepeatNgram(no_repeat_ngram_size=1), [1, 2], prompt=[0, 1]) == [1, 2]


# Given tokens.


def test_logit_bias_adds():
    """By id; a masked token stays masked; keys are ids however JSON writes them."""
    stage = LogitBias.model_validate_json('{"logit_bias": {"0": -100, "2": 1.5, "3": 5}}', strict=True)
    assert after(stage, [1, 1, 1, -INF]) == [-99, 1, 2.5, -INF]


def test_allowed_token_ids_by_hand():
    """Only the listed ones stay."""
    assert after(AllowedTokenIds(allowed_token_ids=(2, 0, 2)), [1, 5, 3]) == [1, -INF, 3]


def test_suppress_tokens_by_hand():
    """Only the listed ones go."""
    assert after(SuppressTokens(suppress_tokens=(2, 0, 2)), [1, 5, 3]) == [-INF, 5, -INF]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([], [], [5]),
        ([1], [], [2, 4, 5]),  # "a" "b" and [1, 4]
        ([], [1], [2, 4, 5]),
        ([1], [2], [3, 5]),  # "a" "b" "c": the prefix lies in both
        ([2], [1, 2], [3, 5]),
        ([1], [3], [5]),
    ],
)
def test_bad_words_by_hand(prompt: list[int], output: list[int], expected: list[int]):
    """The token that would complete a word, and only then; "ab" is 97 98, modulo 12: 1 2."""
    stage = BadWords(bad_words=("ab", "abc"), bad_words_token_ids=((5,), (1, 4)))
    assert banned(stage, prompt, output) == expected


def test_bad_words_are_also_tokenised_with_a_space():
    """A space before the word makes other tokens, which are caught too: 32 is 8 modulo 12."""
    assert banned(BadWords(bad_words=("a",)), [8]) == [1]
    assert BadWords(bad_words=("a",)).apply.__doc__
    stage = BadWords(bad_words=("abcd",))
    assert banned(stage, [8, 1, 2, 3]) == [4]


@pytest.mark.parametrize(
    ("stage", "logits"),
    [
        (AllowedTokenIds(allowed_token_ids=(1,)), [0, -INF]),
        (SuppressTokens(suppress_tokens=(0,)), [0, -INF]),
        (BadWords(bad_words_token_ids=((0,),)), [0, -INF]),
    ],
    ids=["allowed", "suppressed", "bad"],
)
def test_a_ban_that_cannot_be_kept_is_an_error(stage: Stage, logits: list[float]):
    """Where masks before it leave only what is banned, nothing is chosen instead."""
    with pytest.raises(ValueError, match="no token is left to choose"):
        after(stage, logits)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (LogitBias(logit_bias={3: 1.0, 12: 2.0}), r"logit_bias\.12 must be a token id from 0 to 11; received 12"),
        (AllowedTokenIds(allowed_token_ids=(3, 12)), r"allowed_token_ids\[1\] must be"),
        (SuppressTokens(suppress_tokens=(99,)), r"suppress_tokens\[0\] must be .* received 99"),
        (SuppressTokens(suppress_tokens=tuple(range(12))), "suppress_tokens must leave a token; received all 12"),
        (BadWords(bad_words_token_ids=((1,), (1, 12))), r"bad_words_token_ids\[1\]\[1\] must be"),
        (BadWords(bad_words_token_ids=tuple((i,) for i in range(12))), "bad_words_token_ids must leave a token"),
        (Dry(dry_sequence_breaker_ids=(12,)), r"dry_sequence_breaker_ids\[0\] must be"),
    ],
)
def test_ids_outside_the_vocabulary(stage: Stage, message: str):
    """Refused at admission, with field, place, range and value."""
    with pytest.raises(ValueError, match=message):
        stage.check(sample_model_info(SIZE))
