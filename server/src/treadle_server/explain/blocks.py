"""What a walk is made of: chapters of texts, formulas, matrices, heatmaps, distributions and tables.

Blocks hold values and words; how they look is up to `terminal` and `page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from treadle_plugin_api.backend import Array

# A matrix up to this size is shown whole; of a larger one the first rows and columns, and the last.
MAX_ROWS, MAX_COLUMNS = 10, 8
_SHOWN_ROWS, _SHOWN_COLUMNS = 4, 4
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph of plain sentences."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A remark beside the walk, such as a slip in the document."""

    text: str


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula on a line of its own."""

    text: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Numbers in rows and columns.

    Attributes:
        name: what it is called in the formulas.
        values: `[rows, columns]`.
        rows: a label for each row.
        columns: a label for each column; none if empty.
    """

    name: str
    values: Array
    rows: Sequence[str]
    columns: Sequence[str] = ()

    @property
    def shape_text(self) -> str:
        """Its size in words: 3 x 4."""
        return f"{self.values.shape[0]} × {self.values.shape[1]}"

    def cells(self) -> list[list[str]]:
        """Return the rows to show, each beginning with its label, and the column labels as the first row if any."""
        rows = _shown(self.values.shape[0], MAX_ROWS, _SHOWN_ROWS)
        columns = _shown(self.values.shape[1], MAX_COLUMNS, _SHOWN_COLUMNS)
        lines = [[self._label(row), *(self._cell(row, column) for column in columns)] for row in rows]
        if self.columns:
            lines.insert(0, ["", *(ELLIPSIS if c is None else self.columns[c] for c in columns)])
        return lines

    def _label(self, row: int | None) -> str:
        return ELLIPSIS if row is None else self.rows[row]

    def _cell(self, row: int | None, column: int | None) -> str:
        if row is None or column is None:
            return ELLIPSIS
        value = self.values[row, column]
        return number_text(float(value)) if self.values.dtype.kind == "f" else str(value)


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Shares between 0 and 1, shown as colours: how much each row looks at each column.

    Attributes:
        name: what it is called in the formulas.
        values: `[rows, columns]`, each in [0, 1].
        rows: a label for each row.
        columns: a label for each column.
    """

    name: str
    values: Array
    rows: Sequence[str]
    columns: Sequence[str]


@dataclass(frozen=True, slots=True)
class Bar:
    """One token of a distribution; one that is not kept has been ruled out."""

    label: str
    probability: float
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities as bars."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Table:
    """Words and numbers in columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = Text | Note | Formula | Matrix | Heatmap | Distribution | Table


@dataclass(frozen=True, slots=True)
class Chapter:
    """One step of a walk."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Part:
    """A walk's chapters on one subject, with a paragraph before them."""

    title: str
    introduction: str
    chapters: Sequence[Chapter]


@dataclass(frozen=True, slots=True)
class Walk:
    """Everything that is shown."""

    title: str
    parts: Sequence[Part]


def best_ids(probabilities: Array, count: int = 10) -> list[int]:
    """Return the ids of the most likely tokens, best first, the lowest id first among equals."""
    return [int(i) for i in np.argsort(-probabilities, kind="stable")[:count]]


def distribution(name: str, labels: Mapping[int, str], probabilities: Array) -> Distribution:
    """Return a bar for each labelled id, in the labels' order; a probability of 0 counts as ruled out."""
    return Distribution(
        name, [Bar(label, float(probabilities[i]), bool(probabilities[i] > 0)) for i, label in labels.items()]
    )


def number_text(value: float) -> str:
    """Return a number in three or four digits: 1.255, -0.42, 312.4; a blocked score as -∞."""
    if np.isneginf(value):
        return "-∞"
    if abs(value) >= 10000:
        return f"{value:.1e}"
    text = f"{value:.{3 if abs(value) < 100 else 1}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def percent_text(probability: float) -> str:
    """Return a probability in percent, never 0 for what is possible: 55.5%, 0.06%, <0.01%."""
    percent = 100 * probability
    if 0 < percent < 0.01:
        return "<0.01%"
    return f"{percent:.1f}%" if percent >= 1 or percent == 0 else f"{percent:.2f}%"


def _shown(count: int, most: int, first: int) -> list[int | None]:
    """Return the indices to show; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(first), None, count - 1]
