"""`treadle explain` as its readers meet it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]  # the fixture `treadle`

CHAPTERS = {
    "1  Words become numbers": ["X_input = X + PE", "1.141   1.240  0.210  1.600"],
    "2  Query, key and value": ["Q = X_input · W_q", "0.997  1.416  1.836", "0.50·0.10 + 1.20·0.40"],
    "3  Scores": ["S = Q · Kᵀ", "6.400  5.480  3.278", "S / √3"],
    "4  Softmax": ["64.31 / 107.39 = 0.599", "0.60"],
    "5  Output": ["Z = A · V", "1.295  1.673  2.051"],
    "6  Several heads": ["Z_concat = [Z1 | Z2]", "2.309  2.967  3.625  4.283", "2.130  2.742  3.353  3.966"],
    "7  From logits": ["9.974 / 17.972 = 55.5%", "<PAD>"],
    "8  Temperature": ["T = 0.3", "96.8%", "41.5%"],
    "9  Top-k": ["after top-k = 3", "64.3%", "ruled out"],
    "10  Top-p": ["after top-p = 0.9", "0.925", "stays"],
    "11  Which setting": ["creative (temperature 1)", "0.9 to 1.2"],
    "12  Loss": ["mean loss = (1.689 + 2.034 + 3.243) / 3 = 2.322"],
    "Layer 0: attention head 1": ["-∞", "A = softmax(S masked)", "looks most at 猫"],
    "Layer 0: after attention": ["H = relu(U)", "(3 × 48)"],
    "Choosing the next token": ["After “猫 追” the model expects", "after temperature = 0.7", "老鼠"],
    "Loss": ["mean loss = 0.156", "70.0%"],
}


@pytest.fixture(scope="module")
def shown(treadle: Run) -> str:
    """What `treadle explain` writes into a pipe."""
    return str(treadle("explain").stdout)


def chapter(shown: str, title: str) -> str:
    """Return the last chapter whose title begins so, up to the next one."""
    start = shown.rindex(f"\n{title}")
    stop = shown.find("\n─", shown.find("\n─", start) + 1)
    return shown[start : None if stop < 0 else stop]


@pytest.mark.parametrize("title", CHAPTERS)
def test_each_chapter_has_its_formulas_and_numbers(shown: str, title: str) -> None:
    """The walk shows the exact matrices of the document, then the bundled model's."""
    text = chapter(shown, title)
    for expected in CHAPTERS[title]:
        assert expected in text


def test_a_pipe_gets_no_colour(shown: str) -> None:
    """What is no terminal gets plain text."""
    assert "\x1b" not in shown


def test_slips_of_the_document_are_pointed_out(shown: str) -> None:
    """A reader with the document at hand is told where its numbers are wrong."""
    assert "printed 0.0001, exact 0.0100" in " ".join(shown.split())


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_colour_unless_it_says_no(environment: dict[str, str], *, coloured: bool) -> None:
    """Heatmaps have coloured backgrounds in a terminal; NO_COLOR is respected."""
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "treadle_server.cli", "explain", "猫 追"]
    settings = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", **environment}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings) as process:
        os.close(terminal)
        written = read_all(person)
        assert process.wait(timeout=60) == 0
    assert ("48;2;" in written) is coloured
    assert "looks most at" in written


def read_all(descriptor: int) -> str:
    """Read what a terminal shows up to its end."""
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:  # how Linux reports that the other end has closed
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


def test_a_prompt_is_explained_with_a_model(treadle: Run, tiny_folder: Path) -> None:
    """The chosen layer and head, the tokens, the stages of the choice."""
    options = (
        "--model",
        tiny_folder,
        "--layer",
        "1",
        "--head",
        "2",
        "--temperature",
        "0.5",
        "--top-k",
        "4",
        "--seed",
        "7",
    )
    text = treadle("explain", "the cat sat", *options).stdout
    for expected in ("Layer 1: attention head 2", "␣cat", "after temperature = 0.5", "after top-k = 4", "the seed 7"):
        assert expected in text
    assert "handworked" not in text


def test_greedy_is_explained(treadle: Run) -> None:
    """Temperature 0 leaves no draw: the likeliest token is taken."""
    text = treadle("explain", "猫 追", "--temperature", "0").stdout
    text = " ".join(text.split())
    assert "The most likely one is taken, and nothing is left to chance: 老鼠." in text
    assert "drawn at random" not in text[text.index("Choosing the next token") :]


class _Page(HTMLParser):
    """Counts the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1


def test_html_is_one_page_with_pictures(treadle: Run, tmp_path: Path) -> None:
    """--html writes a page with every chapter and inline pictures, and nothing to stdout."""
    path = tmp_path / "page.html"
    done = treadle("explain", "--html", path)
    assert done.stdout == ""
    assert str(path) in done.stderr
    page = path.read_text(encoding="utf-8")
    parser = _Page()
    parser.feed(page)
    assert parser.counts["svg"] >= 15
    assert parser.counts["section"] == 20
    assert "script" not in parser.counts
    assert page.startswith("<!DOCTYPE html>")
    assert "老鼠" in page


def test_html_of_a_prompt(treadle: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A prompt's page has its heatmap and its distributions."""
    path = tmp_path / "page.html"
    treadle("explain", "the cat sat", "--model", tiny_folder, "--html", path)
    parser = _Page()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.counts["svg"] == 5  # one head; the model's own distribution and three stages


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["x", "--model", "cat-mouse", "--layer", "1"], 2, "layer: must be in [0, 0], got 1"),
        (["猫", "--head", "2"], 2, "head: must be in [0, 1], got 2"),
        (["猫", "--head", "-1"], 2, "head: must be in [0, 1], got -1"),
        (["猫", "--temperature", "-1"], 2, "temperature: must be"),
        (["猫", "--top-p", "0"], 2, "top_p: must be"),
        (["--layer", "0"], 2, "--layer needs a PROMPT"),
        (["--model", "cat-mouse"], 2, "--model needs a PROMPT"),
        (["猫", "--model", "nowhere"], 1, "nowhere"),
        (["猫", "--html", "no/such/folder/page.html"], 1, "cannot write no/such/folder/page.html"),
    ],
)
def test_wrong_use_is_named(treadle: Run, arguments: list[str], status: int, message: str) -> None:
    """An unknown layer or head, a bad knob, a missing prompt, model or folder: one clear line each."""
    assert message in treadle("explain", *arguments, status=status).stderr
