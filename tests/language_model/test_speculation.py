"""Speculative decoding changes how many passes are needed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.engine.lane import Lane
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.engine.speculation import PromptLookup
from treadle_server.errors import CheckpointError, InvalidRequestError
from treadle_server.language_model import Delta
from treadle_server.model.kv_cache import KVCache

REPETITIVE = [5, 90, 41, 7, 200, 5, 90, 41, 7, 200, 5, 90, 41]


@pytest.fixture(scope="module")
def drafting_model(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The tiny model in reproducible mode, drafting for itself: every greedy draft is right."""
    with LanguageModel.load(tiny_folder, numerics="reproducible", draft=tiny_folder) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize("speculation", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_those_without_speculation(
    drafting_model: LanguageModel, speculation: str, temperature: float, n: int
) -> None:
    """In reproducible mode the tokens and logprobs are the same at any temperature, for every choice."""
    knobs = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": True, "n": n, "logprobs": "raw"}
    plain = drafting_model.generate(REPETITIVE, **knobs)
    drafted = drafting_model.generate(REPETITIVE, **knobs, speculation=speculation, num_draft_tokens=4)
    for a, b in zip(plain.choices, drafted.choices, strict=True):
        assert (a.token_ids, a.logprobs, a.finish.reason) == (b.token_ids, b.logprobs, b.finish.reason)


def test_perfect_drafts_take_few_passes(drafting_model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is always right confirms five tokens with each pass of the large one."""
    passes = []
    forward = drafting_model.decoder.forward
    monkeypatch.setattr(drafting_model.decoder, "forward", lambda *a, **k: passes.append(1) or forward(*a, **k))
    finish = (
        drafting_model.generate(
            REPETITIVE, temperature=0, max_tokens=51, ignore_eos=True, speculation="draft_model", num_draft_tokens=4
        )
        .choices[0]
        .finish
    )
    assert finish.num_generated_tokens == 51
    assert finish.num_accepted_tokens == finish.num_draft_tokens == 40
    assert len(passes) == 11  # the prefill, and 50 tokens by 5


def test_tokens_of_one_step_come_together(drafting_model: LanguageModel) -> None:
    """A step that confirms five tokens makes one delta of them."""
    knobs = {"temperature": 0, "max_tokens": 51, "ignore_eos": True, "num_draft_tokens": 4, "logprobs": "raw"}
    events = drafting_model.stream(REPETITIVE, **knobs, speculation="draft_model")
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [len(delta.token_ids) for delta in deltas] == [1] + 10 * [5]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


def test_stop_in_the_middle_of_a_draft_ends_there(drafting_model: LanguageModel) -> None:
    """Tokens confirmed past a stop token or stop string are neither returned nor counted."""
    knobs = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = drafting_model.generate(REPETITIVE, **knobs)
    ids = whole.choices[0].token_ids
    for stop in ({"stop_token_ids": [ids[7]]}, {"stop": whole.text[9:12]}):
        plain = drafting_model.generate(REPETITIVE, **knobs, **stop)
        drafted = drafting_model.generate(REPETITIVE, **knobs, **stop, speculation="draft_model")
        assert drafted.text == plain.text
        assert drafted.choices[0].token_ids == plain.choices[0].token_ids


def test_preemption_beside_speculation_changes_nothing(tiny_folder: Path, drafting_model: LanguageModel) -> None:
    """With memory for two sequences only, five speculating choices still give the same tokens."""
    knobs = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "n": 5, "speculation": "prompt_lookup"}
    expected = drafting_model.generate(REPETITIVE, **knobs)
    limits = EngineLimits(max_kv_bytes=drafting_model.kv_bytes_for(128))
    with LanguageModel.load(tiny_folder, numerics="reproducible", engine_limits=limits) as model:
        got = model.generate(REPETITIVE, **knobs)
    assert [c.token_ids for c in got.choices] == [c.token_ids for c in expected.choices]


@pytest.mark.parametrize("speculation", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("count", [1, 4])
def test_prefill_that_leaves_one_token_forks_without_drafts(tiny_folder: Path, speculation: str, count: int) -> None:
    """A prompt of one token more than whole chunks looks like decoding; nothing is drafted before its first token."""
    limits = EngineLimits(max_prefill_tokens=12, max_prefill_tokens_beside_decode=12)
    options = {"numerics": "reproducible", "engine_limits": limits, "draft": tiny_folder}
    with LanguageModel.load(tiny_folder, **options) as model:
        for length in (12, 13, 14, 25):
            prompt = (REPETITIVE * 3)[:length]
            knobs = {"n": 3, "max_tokens": 8, "seed": 1, "ignore_eos": True}
            plain = model.generate(prompt, **knobs)
            drafted = model.generate(prompt, **knobs, speculation=speculation, num_draft_tokens=count)
            assert [c.token_ids for c in drafted.choices] == [c.token_ids for c in plain.choices]
        assert model.engine.load().kv_cache_bytes == 0


@pytest.mark.parametrize("num_requests", [1, 6])
def test_memory_limit_counts_the_draft_models_cache(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    """Keys and values of both models together stay under the limit, for one request and for many."""
    with LanguageModel.load(tiny_folder) as probe:
        limit = probe.kv_bytes_for(64) * (4 if num_requests == 1 else 6)
    held: list[int] = []
    with LanguageModel.load(tiny_folder, draft=tiny_folder, engine_limits=EngineLimits(max_kv_bytes=limit)) as model:
        step = model.engine.step
        monkeypatch.setattr(model.engine, "step", lambda: (step(), held.append(model.engine.scheduler.kv_bytes()))[0])
        streams = [
            model.stream(REPETITIVE, seed=i, max_tokens=100, ignore_eos=True, speculation="draft_model", n=1 + i % 3)
            for i in range(num_requests)
        ]
        for stream in streams:
            assert list(stream)[-1].num_generated_tokens == 100
    assert 0 < max(held) <= limit


def lane(ids: list[int], drafting_model: LanguageModel) -> Lane:
    """Make a lane with these tokens."""
    return Lane(np.array(ids, np.int64), KVCache(drafting_model.config))


def test_prompt_lookup_continues_the_latest_longest_match(drafting_model: LanguageModel) -> None:
    """The draft is what followed the last earlier place of the longest run of newest tokens."""
    cases = [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the later place
        ([3, 1, 2, 7, 7, 1, 2, 8, 3, 1, 2], 1, [7]),  # the longer match
        ([1, 2, 3, 4], 3, []),
        ([5], 3, []),
        ([6, 6, 6, 6, 6], 3, [6]),  # only what is there
    ]
    for ids, count, expected in cases:
        found = lane(ids, drafting_model)
        PromptLookup().draft([found], [count])
        assert [found.num_drafted, found.drafted_next()] == [len(expected), expected[0] if expected else None]


def test_wrong_options_are_refused(drafting_model: LanguageModel, model: LanguageModel) -> None:
    """Counts without speculation, out of range, beside guidance, or without a draft model name the field."""
    cases = [
        (drafting_model, {"num_draft_tokens": 3}, "num_draft_tokens"),
        (drafting_model, {"num_draft_tokens": 0, "speculation": "prompt_lookup"}, "num_draft_tokens"),
        (drafting_model, {"guidance_scale": 2.0, "speculation": "prompt_lookup"}, "speculation"),
        (model, {"speculation": "draft_model"}, "speculation"),
    ]
    for loaded, options, field in cases:
        with pytest.raises(InvalidRequestError) as caught:
            loaded.generate([5], **options)
        assert [v.field for v in caught.value.violations] == [field]


def test_draft_model_of_other_tokens_is_refused(tiny_folder: Path) -> None:
    """A draft model must have the same vocabulary."""
    with pytest.raises(CheckpointError, match="tokens are not those"):
        LanguageModel.load(tiny_folder, draft="cat-mouse")
