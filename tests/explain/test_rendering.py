"""How walks look: in terminals of any width, without colour, and as a page."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Literal

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from treadle_server import LanguageModel
from treadle_server.explain.blocks import (
    Chapter,
    Formula,
    Heatmap,
    Matrix,
    Note,
    Part,
    Table,
    Text,
    Walk,
    distribution,
    number_text,
    percent_text,
)
from treadle_server.explain.colours import rgb
from treadle_server.explain.page import make_page
from treadle_server.explain.terminal import render
from treadle_server.explain.walk import document_walk

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "<script>alert(1)</script>&[bold]\x1b[31m"


class _Balanced(HTMLParser):
    """Checks that every element is closed where it was opened, and collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> _Balanced:
    """Parse a page; it must be balanced."""
    parser = _Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def console(width: int, colour: Literal["truecolor"] | None = None) -> Console:
    """A console of a width, with colour or without."""
    return Console(file=io.StringIO(), width=width, color_system=colour, force_terminal=colour is not None)


@pytest.fixture(scope="module")
def walk(cat_mouse: LanguageModel) -> Walk:
    """The walk of `treadle explain` without a prompt."""
    return document_walk(cat_mouse)


def small_walk(*blocks: object) -> Walk:
    """A walk of some blocks."""
    return Walk("walk", [Part("part", "introduction", [Chapter("chapter", blocks)])])  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(walk: Walk, width: int) -> None:
    """Chinese signs are two columns wide; nothing is cut off by the terminal."""
    lines = render(walk, console(width)).splitlines()
    assert max(map(cell_len, lines)) <= width


def test_without_colour_there_are_no_escapes(walk: Walk) -> None:
    """Where there is no colour a heatmap's shades say what its colours do."""
    text = render(walk, console(80))
    assert "\x1b" not in text
    assert "▓ 0.63" in text


def test_with_colour_a_heatmap_has_backgrounds(walk: Walk) -> None:
    """Each cell has the colour of its share behind it."""
    assert re.search(r"48;2;\d+;\d+;\d+m +0\.63", render(walk, console(80, "truecolor")))


def test_no_line_ends_in_blanks(walk: Walk) -> None:
    """What is piped into a file is clean."""
    assert not [line for line in render(walk, console(80)).splitlines() if line != line.rstrip()]


def test_a_page_is_balanced_and_needs_nothing_else(walk: Walk) -> None:
    """Links lead to the page's own chapters; there is no script, and no address but the namespace of SVG."""
    page = make_page(walk)
    found = parsed(page)
    assert {"svg", "rect", "table", "style"} <= found.tags
    assert not {"script", "link", "img", "iframe"} & found.tags
    assert found.links
    assert all(link.startswith("#part-") for link in found.links)
    assert {*re.findall(r"https?://[^\s\"'<>)]+", page)} == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page
    assert "@import" not in page


def test_every_link_has_its_chapter(walk: Walk) -> None:
    """The contents lead to ids that exist, once each."""
    page = make_page(walk)
    ids = re.findall(r'id="([^"]+)"', page)
    assert sorted(re.findall(r'href="#([^"]+)"', page)) == sorted(ids)
    assert len(ids) == len(set(ids)) == sum(len(part.chapters) for part in walk.parts)


def test_tokens_are_text_and_nothing_else() -> None:
    """Markup of HTML and of the terminal in a token is shown, never followed."""
    labels = [HOSTILE, "b"]
    values = np.array([[1.0, 0.0], [0.5, 0.5]])
    walk = small_walk(
        Text(HOSTILE),
        Note(HOSTILE),
        Formula(HOSTILE),
        Matrix(HOSTILE, values, labels, labels),
        Heatmap(HOSTILE, values, labels, labels),
        distribution(HOSTILE, dict(enumerate(labels)), values[0]),
        Table(labels, [labels]),
    )
    assert "script" not in parsed(make_page(walk)).tags
    assert "<script>alert(1)" in render(walk, console(300))
    assert "[bold]" in render(walk, console(300))


@pytest.mark.parametrize("columns", [9, 30, 128])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_heatmap_of_many_tokens_fits(columns: int, width: int) -> None:
    """Many tokens become small cells; what does not fit is left out at the front, and that is said."""
    labels = [f"token{i}" for i in range(columns)]
    text = render(small_walk(Heatmap("A", np.eye(columns), labels, labels)), console(width))
    assert max(map(cell_len, text.splitlines())) <= width
    assert f"{columns - 1} token"[:6] in text
    assert ("(the last" in text) == (2 * columns > width - 17)


def test_a_large_matrix_shows_its_corners() -> None:
    """First rows and columns, the last ones, and the size of the whole."""
    matrix = Matrix(
        "X", np.arange(2000.0).reshape(20, 100), [f"r{i}" for i in range(20)], [f"c{i}" for i in range(100)]
    )
    cells = matrix.cells()
    assert cells[0] == ["", "c0", "c1", "c2", "c3", "…", "c99"]
    assert cells[-1][0] == "r19"
    assert cells[-1][-1] == "1999.0"
    assert len(cells) == 7
    assert matrix.shape_text == "20 × 100"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.2554, "1.255"), (-0.0001, "0.000"), (-0.42, "-0.420"), (312.44, "312.4"), (-np.inf, "-∞"), (1e7, "1.0e+07")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    """Three decimals, one for large numbers, and no minus before zero."""
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("probability", "text"), [(0.555, "55.5%"), (1, "100.0%"), (0, "0.0%"), (0.0006, "0.06%"), (1e-7, "<0.01%")]
)
def test_percentages_never_hide_what_is_possible(probability: float, text: str) -> None:
    """Only 0 is 0%."""
    assert percent_text(probability) == text


def test_colours_darken_with_the_share() -> None:
    """A larger share is darker; shares outside the range take the ends."""
    brightness = [sum(rgb(i / 20)) for i in range(21)]
    assert brightness == sorted(brightness, reverse=True)
    assert rgb(-1) == rgb(0)
    assert rgb(2) == rgb(1)
