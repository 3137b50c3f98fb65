"""Heatmaps and distributions as SVG, built element by element so that everything in them is escaped."""

from __future__ import annotations

import unicodedata
from xml.etree.ElementTree import Element, SubElement

from treadle_server.explain.blocks import Distribution, Heatmap, percent_text
from treadle_server.explain.colours import rgb, text_is_white

_CHARACTER_WIDTH = 7.4  # of the font, roughly; wide characters count as two
_MAX_LABEL = 18
_CELL_LABEL = 8  # above a cell that holds a number
_CELL, _SMALL_CELL = 66, 20
_NUMBERED_COLUMNS = 12  # up to as many columns, a cell is large enough to hold its number
_BAR_WIDTH, _BAR_HEIGHT, _BAR_STEP = 380, 18, 24


def heatmap_picture(heatmap: Heatmap) -> Element:
    """Return a grid of coloured cells; rows look, columns are looked at."""
    numbered = len(heatmap.columns) <= _NUMBERED_COLUMNS
    cell = _CELL if numbered else _SMALL_CELL
    left = 12 + max(map(_text_width, heatmap.rows))
    top = 24 if numbered else 10 + max(map(_text_width, heatmap.columns))
    width, height = left + cell * len(heatmap.columns) + 10, top + cell * len(heatmap.rows) + 4
    picture = _picture(width, height, f"Heatmap: {heatmap.name}")
    for column, label in enumerate(heatmap.columns):
        _column_label(picture, label, left + cell * (column + 0.5), top - 6, turned=not numbered)
    for row, label in enumerate(heatmap.rows):
        y = top + cell * row
        _text(picture, left - 6, y + cell / 2 + 4, _cut(label), "end")
        for column, value in enumerate(heatmap.values[row].tolist()):
            rectangle = _cell(picture, left + cell * column, y, cell, value)
            name = f"{label} → {heatmap.columns[column]}: {value:.3f}"
            SubElement(rectangle, "title").text = name
            if numbered:
                colour = "#fff" if text_is_white(value) else "#111"
                _text(picture, left + cell * (column + 0.5), y + cell / 2 + 4, f"{value:.2f}", "middle", colour)
    return picture


def distribution_picture(distribution: Distribution) -> Element:
    """Return horizontal bars, one a token; the full width is a probability of 1."""
    left = 12 + max((_text_width(bar.label) for bar in distribution.bars), default=0)
    width, height = left + _BAR_WIDTH + 70, _BAR_STEP * len(distribution.bars) + 4
    picture = _picture(width, height, f"Bars: {distribution.name}")
    for index, bar in enumerate(distribution.bars):
        y = _BAR_STEP * index + 2
        _text(picture, left - 6, y + 14, _cut(bar.label), "end", None if bar.kept else "#888")
        length = max(1.0, bar.probability * _BAR_WIDTH) if bar.kept else 0.0
        SubElement(
            picture,
            "rect",
            x=f"{left}",
            y=f"{y}",
            width=f"{length:.1f}",
            height=f"{_BAR_HEIGHT}",
            fill="#3182bd",
            rx="2",
        )
        text = percent_text(bar.probability) if bar.kept else "ruled out"
        _text(picture, left + length + 6, y + 14, text, "start", None if bar.kept else "#888")
    return picture


def _picture(width: float, height: float, title: str) -> Element:
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"0 0 {width:.0f} {height:.0f}"}
    picture = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title, **size})
    SubElement(picture, "title").text = title
    return picture


def _cell(picture: Element, x: float, y: float, cell: int, value: float) -> Element:
    red, green, blue = rgb(value)
    place = {"x": f"{x:.0f}", "y": f"{y:.0f}", "width": f"{cell - 1}", "height": f"{cell - 1}"}
    return SubElement(picture, "rect", {**place, "fill": f"#{red:02x}{green:02x}{blue:02x}"})


def _column_label(picture: Element, label: str, x: float, y: float, *, turned: bool) -> None:
    text = _text(picture, x, y, _cut(label, None if turned else _CELL_LABEL), "start" if turned else "middle")
    if turned:
        text.set("transform", f"rotate(-90 {x + 4:.1f} {y:.1f})")
        text.set("x", f"{x + 4:.1f}")


def _text(picture: Element, x: float, y: float, text: str, anchor: str, fill: str | None = None) -> Element:
    element = SubElement(picture, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    if fill is not None:
        element.set("fill", fill)
    element.text = text
    return element


def _cut(label: str, length: int | None = None) -> str:
    length = length or _MAX_LABEL
    return label if len(label) <= length else label[: length - 1] + "…"


def _text_width(label: str) -> float:
    columns = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in _cut(label))
    return columns * _CHARACTER_WIDTH
