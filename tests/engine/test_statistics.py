"""What an engine counts of what it does."""

from __future__ import annotations

import pytest
from treadle_server import LanguageModel
from treadle_server.engine.statistics import DurationHistogram, EngineStatistics


def test_histogram_counts_up_to_and_with_each_bound() -> None:
    """A duration that equals a bound is within it; longer ones than all count in the last place."""
    histogram = DurationHistogram((0.1, 1.0))
    for duration_s in (0.05, 0.1, 0.5, 3.0):
        histogram.add(duration_s)
    assert histogram.cumulative() == [2, 3, 4]
    assert histogram.sum_s == pytest.approx(3.65)


def test_only_the_first_choice_has_the_requests_first_token() -> None:
    """Choices of one request count one time to the first token, and every later gap."""
    statistics = EngineStatistics()
    for index in range(3):
        statistics.new_token(None, 0.2, index)
        statistics.new_token(0.01, 0.2, index)
    assert statistics.first_token.cumulative()[-1] == 1
    assert statistics.inter_token.cumulative()[-1] == 3


def test_an_engine_counts_its_work(tiny_folder) -> None:
    """Prompts, waits, gaps, model and sampler runs of a generation with two choices."""
    with LanguageModel.load(tiny_folder) as model:
        model.generate([5, 6, 7], n=2, max_tokens=4, ignore_eos=True)
        statistics = model.engine.statistics
    assert statistics.num_prompt_tokens == 3
    assert statistics.queue.cumulative()[-1] == statistics.first_token.cumulative()[-1] == 1
    assert statistics.inter_token.cumulative()[-1] == 2 * 3
    assert statistics.forward.num_runs == statistics.sampler.num_runs == 4
    assert min(statistics.forward.total_s, statistics.sampler.total_s) > 0


def test_drafts_are_counted(tiny_folder) -> None:
    """What speculation drafts, and what of it was sampled, is what the choices say."""
    with LanguageModel.load(tiny_folder, draft=tiny_folder, numerics="reproducible") as model:
        answer = model.generate([5, 6], temperature=0, max_tokens=12, ignore_eos=True, speculation="draft_model")
        statistics, finish = model.engine.statistics, answer.choices[0].finish
    assert 0 < statistics.num_accepted_tokens == finish.num_accepted_tokens
    assert statistics.num_draft_tokens == finish.num_draft_tokens
