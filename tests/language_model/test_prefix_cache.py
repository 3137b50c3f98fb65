"""What earlier texts left in the prefix cache saves work and, in reproducible mode, changes nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_server import LanguageModel
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.language_model import GenerationResult

Load = Callable[..., LanguageModel]
PROMPT = [(7 * i + 3) % 200 for i in range(90)]
KNOBS: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": "raw"}
WITHOUT = EngineLimits(max_prefix_cache_bytes=0)
CROSSING = ["llama_rope_dynamic", "llama_rope_longrope", "phi3_longrope"]


def num_cached(result: GenerationResult) -> int:
    """Tokens of the prompt that were not computed."""
    return result.choices[0].finish.num_cached_tokens


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"n": 3},
        {"guidance_scale": 2.5, "negative_prompt": PROMPT[:70]},
        {"speculation": "prompt_lookup"},
        {"prompt_logprobs": True},
        {"logprobs": "processed", "top_k": 5},
    ],
    ids=lambda knobs: next(iter(knobs), "plain"),
)
def test_the_same_again_is_the_same(load: Load, same: Any, knobs: dict[str, object]) -> None:
    """The second time all but the prompt's last token are known, unless the prompt is to be scored; nothing differs."""
    model, without = load(), load(engine_limits=WITHOUT)
    first, second = (model.generate(PROMPT, **KNOBS | knobs) for _ in range(2))
    expected = 0 if "prompt_logprobs" in knobs else len(PROMPT) - 1
    assert (num_cached(first), num_cached(second)) == (0, expected)
    assert same(first, second)
    assert same(first, without.generate(PROMPT, **KNOBS | knobs))


def test_the_next_turn_of_a_chat_computes_only_what_is_new(load: Load, same: Any) -> None:
    """Prompt and answer are known to the token, and so are both in the turn after that."""
    model, without = load(), load(engine_limits=WITHOUT)
    ids = PROMPT[:40]
    for turn in range(3):
        result = model.generate(ids, **KNOBS)
        assert same(result, without.generate(ids, **KNOBS))
        assert num_cached(result) == (40 + 24 * turn - 5 if turn else 0)
        ids += [*result.choices[0].token_ids, 5, 6, 7, 8]


def test_a_prompt_is_known_while_the_first_still_answers(load: Load, begin: Any) -> None:
    """The keys and values are there once the prompt is read, not only when the answer has ended."""
    model = load()
    running = begin(model, PROMPT, **KNOBS | {"max_tokens": 38})
    assert num_cached(model.generate([*PROMPT, 9], **KNOBS)) == len(PROMPT)
    running.finish()


def test_a_cancelled_answer_leaves_its_work(load: Load) -> None:
    """What was computed before nobody wanted more of it is not computed again."""
    model = load()
    stream = model.stream(PROMPT, **KNOBS)
    next(stream), next(stream)
    stream.close()
    assert num_cached(model.generate(PROMPT, **KNOBS)) == len(PROMPT) - 1


def test_new_weights_never_read_old_keys_and_values(load: Load, same: Any, begin: Any, second_folder: Path) -> None:
    """After an update nothing is known, also when an answer of the old version ends later; the memory is given back."""
    model, second = load(), load(second_folder)
    model.generate(PROMPT, **KNOBS)
    old = begin(model, PROMPT, **KNOBS | {"max_tokens": 38})
    model.update_weights(second_folder)
    assert model.engine.prefix_cache.num_bytes == 0
    old.finish()
    first, again = (model.generate(PROMPT, **KNOBS) for _ in range(2))
    assert (num_cached(first), num_cached(again)) == (0, len(PROMPT) - 1)
    assert same(first, second.generate(PROMPT, **KNOBS))
    assert same(first, again)


def test_without_memory_nothing_is_kept(load: Load) -> None:
    """A limit of 0 turns it off."""
    model = load(engine_limits=WITHOUT)
    results = [model.generate(PROMPT, **KNOBS) for _ in range(2)]
    assert [num_cached(result) for result in results] == [0, 0]
    assert model.engine.prefix_cache.num_bytes == 0


@pytest.mark.parametrize("name", CROSSING)
def test_angles_that_depend_on_the_length_are_part_of_the_key(golden: Path, name: str) -> None:
    """Prompts of every length around the limit, each a beginning of the next, give what they give without a cache."""
    reference = np.load(golden / "parity" / f"{name}.npz")
    ids = [*reference["ids_5"].tolist(), *reference["greedy_cached_ids"].tolist()]
    knobs: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": "raw"}
    folder = golden / "models" / name
    with (
        LanguageModel.load(folder, numerics="reproducible") as model,
        LanguageModel.load(folder, numerics="reproducible", engine_limits=WITHOUT) as without,
    ):
        for length in [*range(3, len(ids)), *range(len(ids) - 1, 3, -2)]:
            got, expected = (one.generate(ids[:length], **knobs).choices[0] for one in (model, without))
            assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)
        assert model.engine.prefix_cache.num_hit_tokens > 0


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3), st.integers(1, 3)), min_size=4, max_size=12),
    st.integers(1, 60),
)
def test_crowds_with_common_beginnings_get_what_they_get_alone(
    load: Load, requests: list[tuple[int, int, int]], num_blocks: int
) -> None:
    """With little memory for both, concurrent requests are put back, forgotten and recalled; their tokens stay."""
    model, without = load(), load(engine_limits=WITHOUT)
    block = model.kv_bytes_for(64)
    small = load(engine_limits=EngineLimits(max_kv_bytes=6 * block, max_prefix_cache_bytes=num_blocks * block // 8))

    def tokens(one: LanguageModel, request: tuple[int, int, int]) -> list[tuple[int, ...]]:
        length, ending, n = request
        result = one.generate([*PROMPT[:length], ending], **KNOBS | {"n": n, "seed": ending})
        return [choice.token_ids for choice in result.choices]

    expected = [tokens(without, request) for request in requests]
    for one in (model, small):
        with ThreadPoolExecutor(len(requests)) as pool:
            assert list(pool.map(lambda request, one=one: tokens(one, request), requests)) == expected
    assert small.engine.prefix_cache.num_bytes <= num_blocks * block // 8
