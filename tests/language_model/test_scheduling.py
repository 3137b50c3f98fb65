"""Requests beside each other: who goes first, who gives memory back, and what a reader that lags does to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_server import LanguageModel
from treadle_server.engine.engine import Engine
from treadle_server.engine.events import ChoiceFinished, EngineEvent, NewToken, RequestFailed
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.engine.sequence import ActiveRequest
from treadle_server.errors import EngineError, InvalidRequestError, SlowReaderError
from treadle_server.language_model import GenerationResult, gather
from treadle_server.language_model.spec import GenerationSpec
from treadle_server.model.kv_cache import KVCache

Load = Callable[..., LanguageModel]
BLOCK = 64  # tokens that memory is taken by


class Stepped:
    """An engine that steps when it is told to. Readers take everything at once, unless they are told to lag."""

    def __init__(self, model: LanguageModel, **limits: int) -> None:
        self.model = model
        self.engine = Engine(model.engine.weights, EngineLimits(**{"max_prefix_cache_bytes": 0, **limits}))
        self.events: dict[str, list[EngineEvent]] = {}
        self.active: dict[str, ActiveRequest] = {}
        self.num_steps = 0

    def submit(self, name: str, num_prompt: int, *, lags: bool = False, **fields: Any) -> None:
        """Queue a request for greedy tokens after a prompt that is its own."""
        prompt = [3 + (len(self.active) * 7 + i) % 290 for i in range(num_prompt)]
        spec = GenerationSpec(prompt=prompt, **{"max_tokens": 4, "ignore_eos": True, "seed": 1, **fields})
        taken = self.events[name] = []

        def deliver(events: list[EngineEvent]) -> None:
            taken.extend(events)
            if not lags:
                self.active[name].taken(events)

        self.active[name] = self.engine.submit(self.model._admission.generation(spec), deliver)

    def step(self, count: int = 1) -> None:
        """Step so many times."""
        for _ in range(count):
            self.engine.step()
            self.num_steps += 1

    def run(self) -> list[str]:
        """Step until nothing is to be done; return the names of the requests in the order in which they ended."""
        ended: list[str] = []
        while self.engine.scheduler.has_work:
            self.step()
            assert self.num_steps < 2000
            ended += [name for name in self.events if self.has_ended(name) and name not in ended]
        return ended

    def num_tokens(self, name: str) -> int:
        """Return how many tokens a request has."""
        return sum(isinstance(event, NewToken) for event in self.events[name])

    def has_ended(self, name: str) -> bool:
        """Tell whether a request of one choice has ended."""
        return any(isinstance(event, ChoiceFinished | RequestFailed) for event in self.events[name])

    def running(self) -> set[str]:
        """Return the names of those that hold memory."""
        held = {id(s.active) for s in self.engine.scheduler.running}
        return {name for name, active in self.active.items() if id(active) in held}


def test_a_short_prompt_passes_long_ones(exact_model: LanguageModel) -> None:
    """Beside eight long prompts a short one has its first token after a step, and each long one still ends."""
    stepped = Stepped(exact_model, max_prefill_tokens=16, max_prefill_tokens_beside_decode=16)
    for number in range(8):
        stepped.submit(f"long {number}", 100)
    stepped.step(2)
    stepped.submit("short", 8)
    stepped.step()
    assert stepped.num_tokens("short") == 1
    assert sorted(stepped.run()) == sorted(stepped.events)


def test_a_long_prompt_is_computed_however_many_short_ones_come(exact_model: LanguageModel) -> None:
    """Half of the budget is the oldest's: 100 tokens by 4 of 8 are 25 steps."""
    stepped = Stepped(exact_model, max_prefill_tokens=8, max_prefill_tokens_beside_decode=8)
    stepped.submit("long", 100, max_tokens=1)
    while not stepped.has_ended("long"):
        stepped.submit(f"short {stepped.num_steps}", 8, max_tokens=1)
        stepped.step()
    assert stepped.num_steps <= 25


def test_higher_priority_leaves_the_queue_first(exact_model: LanguageModel) -> None:
    """Among equals it is first come, first served."""
    stepped = Stepped(exact_model, max_running=1)
    stepped.submit("running", 8)
    stepped.step()
    for name, priority in (("a", 0), ("b", 0), ("low", -1), ("high", 1)):
        stepped.submit(name, 8, priority=priority)
    assert stepped.run() == ["running", "high", "a", "b", "low"]


def test_memory_is_taken_from_the_lowest_priority_then_from_the_youngest(exact_model: LanguageModel) -> None:
    """Three sequences that each grow to a second block have memory for four between them."""
    stepped = Stepped(exact_model, max_kv_bytes=exact_model.kv_bytes_for(4 * BLOCK))
    for name, priority in (("old", 0), ("high", 2), ("young", 0)):
        stepped.submit(name, 60, priority=priority, max_tokens=30)
    stepped.step(10)
    assert stepped.running() == {"old", "high"}
    assert set(stepped.run()) == {"old", "high", "young"}
    assert stepped.engine.load().num_preemptions == 1
    assert stepped.engine.load().kv_cache_bytes == 0


def test_what_was_put_back_is_not_computed_again_while_the_prefix_cache_has_it(exact_model: LanguageModel) -> None:
    """It goes on with the token that it was to compute next."""
    limit = exact_model.kv_bytes_for(3 * BLOCK)
    stepped = Stepped(exact_model, max_kv_bytes=limit, max_prefix_cache_bytes=limit)
    for name in ("old", "young"):
        stepped.submit(name, 60, max_tokens=30)
    stepped.run()
    assert stepped.engine.load().num_preemptions == 1
    assert stepped.engine.prefix_cache.num_hit_tokens >= 60


@pytest.mark.parametrize("priority", [-101, 101, 0.5, True])
def test_priority_has_a_range(model: LanguageModel, priority: Any) -> None:
    """What is outside is refused by name."""
    with pytest.raises(InvalidRequestError, match="priority"):
        model.stream([5], priority=priority)


def test_a_lagging_reader_pauses_its_own_sequence_alone(exact_model: LanguageModel) -> None:
    """It gets as many tokens as may wait for it; others run to their end, and it goes on when the reader does."""
    stepped = Stepped(exact_model, max_buffered_tokens=5)
    stepped.submit("lagging", 8, lags=True, max_tokens=20)
    stepped.submit("reading", 8, max_tokens=20)
    assert stepped.run() == ["reading"]
    assert stepped.num_tokens("lagging") == 5
    load = stepped.engine.load()
    assert (load.num_paused_sequences, load.num_running_sequences) == (1, 1)
    while not stepped.has_ended("lagging"):
        stepped.active["lagging"].taken(stepped.events["lagging"][-2:])
        stepped.run()
    assert stepped.num_tokens("lagging") == 20


def test_paused_sequences_take_no_place_and_give_up_memory(exact_model: LanguageModel) -> None:
    """Whoever waits is started in place of one that waits for its reader, which is put back with its tokens."""
    limit = exact_model.kv_bytes_for(2 * BLOCK)
    stepped = Stepped(exact_model, max_buffered_tokens=3, max_running=2, max_kv_bytes=limit)
    for name in ("a", "b"):
        stepped.submit(name, 8, lags=True, max_tokens=20)
    stepped.run()
    stepped.submit("reading", 70, max_tokens=20)
    assert stepped.run() == ["reading"]
    assert stepped.running() == set()
    load = stepped.engine.load()
    assert (load.num_paused_sequences, load.num_preempted_sequences, load.num_preemptions) == (2, 2, 2)
    assert load.kv_cache_bytes == 0


def test_a_reader_that_takes_nothing_for_too_long_loses_its_request(load: Load) -> None:
    """The engine sleeps meanwhile, and frees the memory when the time is over."""
    model = load(engine_limits=EngineLimits(max_buffered_tokens=4, max_stall_s=0.5))
    stream = model.stream([5, 6], max_tokens=50, ignore_eos=True)
    wait_for(lambda: model.engine.load().num_paused_sequences == 1)
    num_runs = model.engine.statistics.forward.num_runs
    assert not model.engine.scheduler.has_work
    wait_for(lambda: model.engine.load().num_running_sequences == 0)
    assert model.engine.statistics.forward.num_runs == num_runs
    with pytest.raises(SlowReaderError, match=r"took nothing for 0\.5 s"):
        list(stream)


def test_a_paused_stream_that_is_closed_frees_its_memory_at_once(load: Load) -> None:
    """Cancelling wakes the engine."""
    model = load(engine_limits=EngineLimits(max_buffered_tokens=4))
    stream = model.stream([5, 6], max_tokens=50, ignore_eos=True)
    next(stream)
    wait_for(lambda: model.engine.load().num_paused_sequences == 1)
    stream.close()
    wait_for(lambda: model.engine.load().kv_cache_bytes == 0)


def test_pausing_changes_no_token(load: Load, exact_model: LanguageModel) -> None:
    """A reader that stops now and then gets what it would have got, likely tokens included."""
    model = load(engine_limits=EngineLimits(max_buffered_tokens=7))
    knobs = {"n": 2, "seed": 5, "max_tokens": 30, "ignore_eos": True, "logprobs": "raw", "num_top_logprobs": 2}

    def slowly() -> Iterator[Any]:
        for number, event in enumerate(model.stream([5, 6, 7], **knobs)):
            if number % 16 == 0:
                time.sleep(0.02)
            yield event

    assert contents(gather(slowly())) == contents(exact_model.generate([5, 6, 7], **knobs))


def test_one_request_without_memory_fails_alone(load: Load, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the machine has no memory for a sequence, the prefix cache is given up, then that request ends."""
    model = load()
    model.generate([9] * 70, max_tokens=1)
    assert model.engine.prefix_cache.num_bytes
    beside = begin(model, [5, 6], max_tokens=60, ignore_eos=True)
    make_room = KVCache.make_room

    def short_of_memory(cache: KVCache, num_new: int) -> None:
        if cache.max_tokens == 77:
            raise MemoryError
        make_room(cache, num_new)

    monkeypatch.setattr(KVCache, "make_room", short_of_memory)
    with pytest.raises(EngineError, match="memory"):
        model.generate([8] * 70, max_tokens=7)
    assert model.engine.prefix_cache.num_bytes == 0
    assert len(beside.finish().choices[0].token_ids) == 60


def test_no_memory_to_recall_fails_that_request_and_none_to_remember_fails_nobody(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix cache is a help: what it cannot hold is computed again."""
    model = load()

    def short_of_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy_out", short_of_memory)
        assert model.generate([9] * 70, max_tokens=2, ignore_eos=True).choices[0].finish.num_generated_tokens == 2
    model.generate([9] * 70, max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "extend", short_of_memory)
        with pytest.raises(EngineError, match="memory"):
            model.generate([9] * 70, max_tokens=1)
    assert model.generate([9] * 70, max_tokens=1).choices


# Requests of which each fits into four blocks: two for each lane, draft model included.
POOL: list[dict[str, Any]] = [
    {"prompt": [5, 90, 41, 7, 200], "max_tokens": 80},
    {"prompt": [9, 8, 7] * 20, "max_tokens": 30, "n": 3, "temperature": 0.9},
    {"prompt": [5, 90, 41, 7] * 8, "max_tokens": 40, "speculation": "prompt_lookup"},
    {"prompt": [5, 90, 41, 7] * 9, "max_tokens": 40, "speculation": "draft_model", "n": 2},
    {"prompt": [11, 12, 13], "max_tokens": 70, "guidance_scale": 2.0, "negative_prompt": [14] * 40},
    {"prompt": [21, 22] * 30, "max_tokens": 6, "adapter": "a", "n": 2},
    {"prompt": [31] * 100, "max_tokens": 1, "prompt_logprobs": True},
]


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, second_folder: Path, golden: Path) -> list[list[Any]]:
    """What each request of the pool gives alone, with memory for everything, by weight version less one."""

    def results(model: LanguageModel) -> list[Any]:
        return [contents(model.generate(seed=i, ignore_eos=True, **request)) for i, request in enumerate(POOL)]

    with LanguageModel.load(tiny_folder, numerics="reproducible", draft=tiny_folder) as model:
        model.load_adapter("a", golden / "adapters" / "llama_plain")
        before = results(model)
        model.update_weights(second_folder)
        return [before, results(model)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    picks=st.lists(
        st.tuples(st.integers(0, len(POOL) - 1), st.integers(-2, 2), st.sampled_from([0, 0, 5, 20])),
        min_size=2,
        max_size=7,
    ),
    blocks=st.integers(4, 9),
    running=st.integers(1, 5),
    budgets=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    cached=st.sampled_from([0, 1, 1000]),
    buffered=st.sampled_from([2, 1000]),
    num_old=st.integers(0, 7),
)
def test_every_request_ends_with_the_tokens_that_it_has_alone(
    alone: list[list[Any]],
    tiny_folder: Path,
    second_folder: Path,
    golden: Path,
    picks: list[tuple[int, int, int]],
    blocks: int,
    running: int,
    budgets: tuple[int, int],
    cached: int,
    buffered: int,
    num_old: int,
) -> None:
    """In reproducible mode memory, company, chunks, pauses, priorities and updates change no token; nobody is stuck."""
    limits = EngineLimits(
        max_kv_bytes=blocks * BLOCK_BYTES,
        max_running=running,
        max_prefill_tokens=budgets[0],
        max_prefill_tokens_beside_decode=budgets[1],
        max_prefix_cache_bytes=cached * BLOCK_BYTES,
        max_buffered_tokens=buffered,
    )
    with LanguageModel.load(tiny_folder, numerics="reproducible", draft=tiny_folder, engine_limits=limits) as model:
        model.load_adapter("a", golden / "adapters" / "llama_plain")
        results: dict[int, Any] = {}
        streams, expected = [], []
        for number, (index, priority, wait_ms) in enumerate(picks):
            time.sleep(wait_ms / 1e3)
            if number == num_old:
                model.update_weights(second_folder)
            streams.append(model.stream(seed=index, ignore_eos=True, priority=priority, **POOL[index]))
            expected.append(alone[number >= num_old][index])

        def read(number: int) -> None:
            results[number] = contents(gather(streams[number]))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(streams))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
        assert [results.get(number) for number in range(len(streams))] == expected
        assert model.engine.load().kv_cache_bytes == 0


BLOCK_BYTES = 2 * 2 * 4 * 16 * 4 * BLOCK  # layers, keys and values, heads, head_dim, bytes of a float32


def contents(result: GenerationResult) -> list[Any]:
    """Return what of a result does not depend on time."""
    prompt = [entry.logprob for entry in result.prompt_info.prompt_logprobs]
    return [prompt, *((choice.token_ids, choice.logprobs, choice.text) for choice in result.choices)]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; fail after ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
