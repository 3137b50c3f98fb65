"""best_of: the choices with the highest mean raw log-probability come back, best first."""

from __future__ import annotations

import pytest
from treadle_server import LanguageModel
from treadle_server.errors import InvalidRequestError

PROMPT = [5, 90, 41, 7, 200]


def test_best_of_keeps_the_best_by_mean_logprob(exact_model: LanguageModel) -> None:
    """The two best of six are those that generating all six and ranking them gives."""
    knobs = {"seed": 8, "max_tokens": 10, "ignore_eos": True}
    every = exact_model.generate(PROMPT, n=6, logprobs="raw", **knobs).choices
    means = sorted(every, key=lambda c: -sum(item.logprob for item in c.logprobs) / len(c.logprobs))
    best = exact_model.generate(PROMPT, n=2, best_of=6, **knobs)
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in means[:2]]
    assert [c.index for c in best.choices] == [c.finish.index for c in best.choices] == [0, 1]
    assert all(c.logprobs == () for c in best.choices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 0}, "must be in"),
        ({"best_of": 129}, "must be in"),
        ({"best_of": 1, "n": 2}, "at least n"),
        ({"best_of": 2, "logprobs": "processed"}, "processed"),
    ],
)
def test_wrong_best_of_is_refused(model: LanguageModel, options: dict, message: str) -> None:
    """Out of range, under n, or without what ranks."""
    with pytest.raises(InvalidRequestError, match=message):
        model.generate(PROMPT, **options)


def test_stream_refuses_best_of_with_the_reason(model: LanguageModel) -> None:
    """A stream cannot know the best before the end."""
    with pytest.raises(InvalidRequestError, match="refused for streams"):
        model.stream(PROMPT, best_of=2)
