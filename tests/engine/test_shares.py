"""A step is divided so that short prompts hardly wait and long ones are never starved."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_server.engine.shares import divide


@dataclass(eq=False)
class FakeLane:
    """Tokens that the model has not seen."""

    num_remaining: int
    num_drafted: int = 0


@dataclass(eq=False)
class FakeSequence:
    """What of a sequence the division looks at."""

    lanes: list[FakeLane]
    priority: int = 0
    request: Any = field(init=False)

    def __post_init__(self) -> None:
        self.request = SimpleNamespace(priority=self.priority)

    @property
    def is_decoding(self) -> bool:
        """Whether a single token stands between it and its next one."""
        return all(lane.num_remaining == 1 for lane in self.lanes)


def prompt(num_tokens: int, priority: int = 0) -> FakeSequence:
    """A prompt of so many tokens."""
    return FakeSequence([FakeLane(num_tokens)], priority)


def shares(ready: list[Any], budget: int = 64, beside: int = 16) -> list[int]:
    """Return the tokens that each sequence gets."""
    plan = divide(ready, budget=budget, budget_beside_decode=beside)
    return [sum(item.num_tokens for item in plan if item.sequence is s) for s in ready]


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    """Nobody else wants it."""
    assert shares([prompt(100)]) == [64]


def test_a_decoding_sequence_gets_its_token_and_the_budget_is_smaller_beside_it() -> None:
    """A long prompt does not hold a stream up for long."""
    assert shares([prompt(100), prompt(1)]) == [16, 1]


def test_the_first_in_rank_gets_half_and_the_shortest_the_rest() -> None:
    """A short prompt passes the long ones, but for the one that has waited longest."""
    assert shares([prompt(100), prompt(80), prompt(20)]) == [32, 12, 20]


def test_higher_priority_passes_shorter_prompts() -> None:
    """The rest goes by priority before it goes by length."""
    assert shares([prompt(100), prompt(20), prompt(80, priority=1)]) == [32, 0, 32]


def test_drafts_go_with_the_token_that_they_follow() -> None:
    """One step confirms all of them."""
    sequence = FakeSequence([FakeLane(1, num_drafted=4)])
    assert shares([sequence]) == [5]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_two_lanes_advance_with_any_budget_until_they_decode_together(first: int, second: int, budget: int) -> None:
    """A guided sequence never gets stuck, and neither of its lanes goes past the last token but one alone."""
    lanes = [FakeLane(first), FakeLane(second)]
    sequence = FakeSequence(lanes)
    while not sequence.is_decoding:
        plan = divide([sequence], budget=budget, budget_beside_decode=budget)  # type: ignore[list-item]
        assert 1 <= sum(item.num_tokens for item in plan) <= budget
        for item in plan:
            item.lane.num_remaining -= item.num_tokens  # type: ignore[misc]
    assert [lane.num_remaining for lane in lanes] == [1, 1]


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(2, 120),
    budget=st.integers(3, 64),
    arrivals=st.lists(st.lists(st.tuples(st.integers(2, 200), st.integers(-100, 100)), max_size=4), max_size=30),
)
def test_the_first_in_rank_finishes_however_many_others_come(
    length: int, budget: int, arrivals: list[list[tuple[int, int]]]
) -> None:
    """With nobody ahead of it a prompt of N tokens is done within N / ceil(budget / 2) steps, whoever comes later."""
    first = prompt(length)
    ready: list[Any] = [first]
    steps = 0
    while first.lanes[0].num_remaining > 0:
        ready += [prompt(*arrival) for arrival in (arrivals[steps] if steps < len(arrivals) else [(2, 100)])]
        plan = divide(ready, budget=budget, budget_beside_decode=budget)
        assert sum(item.num_tokens for item in plan if not item.sequence.is_decoding) <= budget
        for item in plan:
            item.lane.num_remaining -= item.num_tokens  # type: ignore[misc]
        ready = [first, *(s for s in ready[1:] if s.lanes[0].num_remaining > 1)]
        steps += 1
    assert steps <= -(-length // -(-budget // 2))
