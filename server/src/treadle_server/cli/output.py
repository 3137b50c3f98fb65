"""What commands write: text as it comes, JSON, and tables."""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_server.cli.failure import writing_stdout
from treadle_server.cli.streams import without_controls

_LONG_WORD, _NARROWEST = 28, 12  # characters of a column


def write(text: str) -> None:
    """Write text to stdout at once."""
    with writing_stdout():
        sys.stdout.write(text)
        sys.stdout.flush()


def write_foreign(text: str) -> None:
    """Write what a model or a server said: as it is, but without control characters where a terminal would obey."""
    write(without_controls(text) if sys.stdout.isatty() else text)


def write_json(value: object) -> None:
    """Write a value to stdout as one line of JSON, exact in every encoding and harmless to a terminal; see `plain`."""
    line = json.dumps(plain(value), ensure_ascii=not _holds_unicode(), allow_nan=False)
    # A character stands in a string, where its escape means the same: controls that JSON allows, and lone surrogates.
    write(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", line) + "\n")


def _holds_unicode() -> bool:
    return codecs.lookup(sys.stdout.encoding).name == "utf-8"


def plain(value: Any) -> Any:
    """Return dataclasses as objects by field, bytes as text (what is no UTF-8 becomes U+FFFD), the rest as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stdout: a rich one on a terminal, lines of tab-separated cells elsewhere.

    White space in a cell is folded into single spaces, so that a row is a line and a tab ends a cell.
    """
    rows = [[without_controls(" ".join(cell.split())) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        write("".join("\t".join(row) + "\n" for row in rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column, width in zip(columns, _widths([columns, *rows], console.width), strict=True):
        table.add_column(column, width=width)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    with writing_stdout():
        console.print(table)


def _widths(rows: Sequence[Sequence[str]], total: int) -> list[int]:
    """Return a width for each column: words stay whole, but very long ones, and those of the last column.

    What is left goes to the columns that want most, a character at a time; one follows each column.
    """
    from rich.cells import cell_len

    cells = list(zip(*rows, strict=True))
    wanted = [max(map(cell_len, column)) for column in cells]
    words = [[cell_len(word) for cell in column for word in cell.split()] for column in cells]
    widths = [min(_LONG_WORD, max(lengths, default=0)) for lengths in words]
    widths[-1] = min(_NARROWEST, widths[-1])
    for _ in range(total - len(widths) - sum(widths)):
        index = max(range(len(widths)), key=lambda i: wanted[i] - widths[i])
        widths[index] += wanted[index] > widths[index]
    return widths


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, in decimal units as disks are sold: 270.6 MB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
