"""Reads a grammar: lists of words or sentences, and plots whose beats are told one after the other.

README.md beside this file describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SEPARATOR = " / "
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Plot:
    """What can happen in a story.

    Attributes:
        style: "named" or "plain" for a plot that needs no opening and says how its characters are called, else "".
        beats: one sentence pattern of each is told, in this order.
    """

    name: str
    style: str
    beats: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """One language's lists and plots."""

    lists: Mapping[str, tuple[str, ...]]
    plots: tuple[Plot, ...]


def load_grammar(language: str) -> Grammar:
    """Read the grammar of a language, `english` or `chinese`."""
    return parse_grammar((_HERE / f"{language}.txt").read_text(encoding="utf-8"))


def parse_grammar(text: str) -> Grammar:
    """Return the grammar that a text describes; raises ValueError naming the line that cannot be read."""
    lists: dict[str, list[str]] = {}
    plots: list[tuple[str, str, list[list[str]]]] = []
    entries: list[str] | None = None
    for number, line in _content_lines(text):
        if line.startswith("@"):
            entries = lists.setdefault(line[1:], [])
        elif line.startswith("== "):
            name, _, style = line[3:].partition(" ")
            plots.append((name, style, []))
            entries = None
        elif line == "--" and plots:
            entries = []
            plots[-1][2].append(entries)
        elif entries is None:
            raise ValueError(f"line {number}: stands in no list and no beat: {line}")
        else:
            entries += line.split(_SEPARATOR)
    made = [Plot(name, style, tuple(map(tuple, beats))) for name, style, beats in plots]
    return Grammar({name: tuple(values) for name, values in lists.items()}, tuple(made))


def _content_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line and not line.startswith("#"):
            yield number, line
