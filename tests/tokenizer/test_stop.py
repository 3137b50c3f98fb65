from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_server.tokenizer import StopMatcher

quick = settings(max_examples=300, deadline=None, database=None)
stops = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4)
cuts = st.lists(st.integers(0, 30), max_size=30)


def run(matcher: StopMatcher, text: str, cuts: list[int]) -> str:
    """Everything that a matcher lets through of a text cut at `cuts`."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(edges)) + matcher.flush()


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """By brute force: where the first match ends, and the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        if ending := [string for string in stop if text.endswith(string, 0, end)]:
            return end, max(ending, key=len)
    return None


@given(text=st.text("ab.", max_size=30), stop=stops, cuts=cuts, include=st.booleans())
@quick
def test_the_first_match_cuts_the_text_however_it_is_split(
    text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    """Text goes through up to the match that ends first, the longest of those; all of it when there is none."""
    matcher = StopMatcher(stop, include_stop=include)
    passed, found = run(matcher, text, cuts), first_match(text, stop)
    if found is None:
        assert (passed, matcher.matched) == (text, None)
    else:
        end, string = found
        assert (passed, matcher.matched) == (text[: end if include else end - len(string)], string)


@given(text=st.text("ab.", max_size=30), stop=stops)
@quick
def test_only_a_true_start_of_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    """After any text the part held back is the longest end of it that begins some stop string."""
    matcher = StopMatcher(stop)
    passed = matcher.push(text)
    if matcher.matched is None:
        held = text[len(passed) :]
        starts = {string[:length] for string in stop for length in range(1, len(string))}
        assert held == max((end for end in starts if text.endswith(end)), key=len, default="")


def test_a_stop_string_over_two_pieces_leaks_nothing() -> None:
    """The start of a stop string at the end of a piece is held until it is decided."""
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi\nUs", "er: ho", "more")] == ["Hi", "", ""]
    assert matcher.matched == "\nUser:"
    assert matcher.flush() == ""


def test_held_text_comes_at_the_end() -> None:
    """When the stream ends inside a possible stop string, the held text is not lost."""
    matcher = StopMatcher(["<end>"])
    assert matcher.push("so <en") == "so "
    assert matcher.flush() == "<en"
    assert matcher.matched is None


def test_a_false_start_is_released_at_once() -> None:
    """As soon as held text cannot become a stop string, it goes out."""
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(char) for char in "<e<x"] == ["", "", "<e", "<x"]


def test_a_dot_in_dots_stops_inside_the_token() -> None:
    """Of a token `...` the text before the stop string `..` remains, which is none."""
    matcher = StopMatcher([".."])
    assert matcher.push("...") == ""
    assert matcher.matched == ".."


def test_without_stop_strings_all_text_passes() -> None:
    """No stop strings, nothing held."""
    assert StopMatcher([]).push("anything") == "anything"


def test_an_empty_stop_string_is_refused() -> None:
    """An empty stop string would match everywhere."""
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])
