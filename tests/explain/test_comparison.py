"""The table of the document's printed numbers."""

from __future__ import annotations

import pytest
from treadle_server.explain.arithmetic import DocumentSteps
from treadle_server.explain.comparison import PATH, make_page
from treadle_server.explain.printed import Printed, printed_numbers


def test_the_page_is_current() -> None:
    """DOCUMENT.md is what `python -m treadle_server.explain.comparison` writes."""
    assert PATH.read_text(encoding="utf-8") == make_page()


@pytest.mark.parametrize(
    ("text", "exact", "agrees"),
    [
        ("1.255", 1.2554999, True),
        ("1.255", 1.2556, False),
        ("0.963", 0.9625, True),  # half a unit: both neighbours are right
        ("0.962", 0.9625, True),
        ("6.1%", 6.14, True),
        ("-0.42", -0.4161, True),
        ("2143", 2143.4, True),
        ("2143", 2135.9, False),
    ],
)
def test_numbers_agree_to_the_printed_digits(text: str, exact: float, agrees: bool) -> None:
    """A number agrees when the exact one rounds to it."""
    assert Printed("1", "x", text, exact).agrees is agrees


@pytest.mark.parametrize("section", ["1.4", "2.3", "2.4", "2.5", "2.6", "6.6", "8.2"])
def test_known_slips_are_found(section: str, steps: DocumentSteps) -> None:
    """The divisor of the positions, rows of Q, K and V, sums of W_o and the temperature tables are told apart."""
    assert not all(number.agrees for number in printed_numbers(steps) if number.section == section)


@pytest.mark.parametrize("section", ["1.3", "6.3", "6.5", "10.2", "10.3", "exercise 1", "exercise 3", "exercise 5"])
def test_sound_sections_agree(section: str, steps: DocumentSteps) -> None:
    """What the document got right is not called wrong."""
    found = [number for number in printed_numbers(steps) if number.section == section]
    assert found
    assert all(number.agrees for number in found)


def test_every_chapter_with_numbers_is_listed(steps: DocumentSteps) -> None:
    """Chapters 1 to 10 and four of the exercises print results."""
    chapters = {number.section.split(".")[0] for number in printed_numbers(steps)}
    assert chapters == {*map(str, range(1, 11)), "exercise 1", "exercise 2", "exercise 3", "exercise 5"}
