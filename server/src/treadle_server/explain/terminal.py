"""Shows a walk in a terminal: colours where there are any, shades and numbers where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from treadle_server.explain.blocks import (
    Block,
    Chapter,
    Distribution,
    Formula,
    Heatmap,
    Matrix,
    Note,
    Part,
    Table,
    Text,
    Walk,
    percent_text,
)
from treadle_server.explain.colours import rgb, text_is_white

_MAX_TEXT_WIDTH = 100  # longer lines are hard to read
_INDENT = 2
_NUMBERED_COLUMNS = 8  # up to as many columns, a heatmap's cells show numbers
_LABEL_WIDTH = 14
_SHADES = " ░▒▓█"
_BAR_WIDTH = 40


def render(walk: Walk, console: Console) -> str:
    """Return a walk as the lines that a console would show, without blanks at their ends."""
    with console.capture() as capture:
        console.print(RichText(walk.title, style="bold"))
        for part in walk.parts:
            for renderable in _part(part, console):
                console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def _part(part: Part, console: Console) -> Iterator[RenderableType]:
    width = min(console.width, _MAX_TEXT_WIDTH)
    yield RichText()
    yield Panel(part.introduction, title=RichText(part.title, style="bold"), title_align="left", width=width)
    for chapter in part.chapters:
        yield RichText()
        yield from _chapter(chapter, console)


def _chapter(chapter: Chapter, console: Console) -> Iterator[RenderableType]:
    width = min(console.width, _MAX_TEXT_WIDTH)
    yield RichText.assemble((chapter.title, "bold cyan"))
    yield RichText("─" * width, style="cyan")
    for number, block in enumerate(chapter.blocks):
        yield Padding(_block(block, console), (1 if number else 0, 0, 0, _indent(block)), expand=False)


def _indent(block: Block) -> int:
    return 0 if isinstance(block, Text) else _INDENT


def _block(block: Block, console: Console) -> RenderableType:
    width = min(console.width, _MAX_TEXT_WIDTH)
    if isinstance(block, Text):
        return _paragraph(block.text, width)
    if isinstance(block, Note):
        return _paragraph(f"! {block.text}", width - _INDENT, style="yellow")
    if isinstance(block, Formula):
        return _paragraph(block.text, console.width - _INDENT, style="bold green")
    if isinstance(block, Matrix):
        return Group(_name(f"{block.name}   ({block.shape_text})"), _grid(block.cells()))
    if isinstance(block, Heatmap):
        return _heatmap(block, console)
    if isinstance(block, Distribution):
        return _bars(block, console)
    return _table(block)


def _paragraph(text: str, width: int, style: str = "") -> RenderableType:
    lines = RichText(text, style=style).wrap(Console(width=width), width)
    return RichText("\n").join(lines)


def _name(name: str) -> RichText:
    return RichText(name, style="bold")


def _grid(cells: Sequence[Sequence[str]]) -> RichTable:
    """Numbers in columns under their labels; the first cell of a row is its label."""
    grid = RichTable.grid(padding=(0, 2), pad_edge=False)
    grid.add_column(justify="left", style="dim", no_wrap=True)
    for _ in cells[0][1:]:
        grid.add_column(justify="right", no_wrap=True)
    for label, *numbers in cells:
        grid.add_row(_fit(label), *(RichText(number, style="" if label else "dim") for number in numbers))
    return grid


def _fit(label: str) -> RichText:
    """Cut a label that is too long for its column."""
    return RichText(label if cell_len(label) <= _LABEL_WIDTH else set_cell_size(label, _LABEL_WIDTH - 1) + "…")


def _table(table: Table) -> RichTable:
    rich_table = RichTable(*table.columns, box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False)
    for row in table.rows:
        rich_table.add_row(*(RichText(cell) for cell in row))
    return rich_table


# ---- distributions --------------------------------------------------------------------------------------------------


def _bars(block: Distribution, console: Console) -> RenderableType:
    grid = RichTable.grid(padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    width = min(_BAR_WIDTH, console.width - _LABEL_WIDTH - 16)
    for bar in block.bars:
        if bar.kept:
            length = max(1, round(bar.probability * width))
            grid.add_row(_fit(bar.label), percent_text(bar.probability), RichText("█" * length, style="cyan"))
        else:
            grid.add_row(_fit(bar.label), RichText("-", style="dim"), RichText("ruled out", style="dim"))
    return Group(_name(block.name), grid)


# ---- heatmaps -------------------------------------------------------------------------------------------------------


def _heatmap(block: Heatmap, console: Console) -> RenderableType:
    if len(block.columns) <= _NUMBERED_COLUMNS:
        return Group(_name(block.name), _numbered(block, console))
    return Group(_name(block.name), _shaded(block, console))


def _numbered(block: Heatmap, console: Console) -> RenderableType:
    """A cell holds its number; where there is no colour, a shade in front of it."""
    width = max(7, *(min(cell_len(label), _LABEL_WIDTH - 4) + 2 for label in block.columns))
    if len(block.columns) * width > console.width - _LABEL_WIDTH - _INDENT:
        width = 7
    lines = [
        RichText(" " * (_LABEL_WIDTH + 1)).append_text(RichText.assemble(*(_centre(c, width) for c in block.columns)))
    ]
    for label, row in zip(block.rows, block.values.tolist(), strict=True):
        line = _row_label(label)
        for value in row:
            text = f"{value:.2f}" if console.color_system else f"{_shade(value)} {value:.2f}"
            line.append(_centre(text, width), _style(value) if console.color_system else "")
        lines.append(line)
    return RichText("\n").join(lines)


def _shaded(block: Heatmap, console: Console) -> RenderableType:
    """A cell is two columns wide: a colour, or a shade. What does not fit is left out at the front."""
    room = max(4, (console.width - _LABEL_WIDTH - _INDENT - 1) // 2)
    first = max(0, len(block.columns) - room)
    lines = [] if not first else [RichText(f"(the last {room} of {len(block.columns)} tokens)", style="dim")]
    for index in range(min(first, len(block.rows)), len(block.rows)):
        line = _row_label(f"{index} {block.rows[index]}")
        for value in block.values[index, first:].tolist():
            line.append("  ", _style(value)) if console.color_system else line.append(_shade(value) * 2)
        lines.append(line)
    lines.append(RichText(" " * (_LABEL_WIDTH + 1) + _ruler(first, len(block.columns)), style="dim"))
    return RichText("\n").join(lines)


def _ruler(first: int, stop: int) -> str:
    """The numbers of the columns, every fifth, each at the left edge of its cell."""
    marks = ((f"{i}" if i % 5 == 0 else "").ljust(2) for i in range(first, stop))
    line = ""
    for place, mark in enumerate(marks):
        line = line.rstrip().ljust(2 * place) + mark
    return line.rstrip()


def _row_label(label: str) -> RichText:
    text = _fit(label)
    return RichText(" " * (_LABEL_WIDTH - text.cell_len)).append_text(text).append(" ")


def _centre(text: str, width: int) -> str:
    if cell_len(text) > width - 1:
        text = set_cell_size(text, width - 2) + "…"
    left = (width - cell_len(text)) // 2
    return " " * left + text + " " * (width - left - cell_len(text))


def _shade(value: float) -> str:
    return _SHADES[min(len(_SHADES) - 1, round(value * (len(_SHADES) - 1)))]


def _style(value: float) -> Style:
    red, green, blue = rgb(value)
    foreground = "#ffffff" if text_is_white(value) else "#111111"
    return Style(color=foreground, bgcolor=f"rgb({red},{green},{blue})")
