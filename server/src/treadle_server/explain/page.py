"""Shows a walk as one HTML page that needs nothing else: styles and pictures are inside it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

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
)
from treadle_server.explain.pictures import distribution_picture, heatmap_picture

_STYLE = """
:root { color-scheme: light dark; --line: #d5dbe3; --dim: #5a6572; --formula: #eef4fa; --note: #fdf4df; }
@media (prefers-color-scheme: dark) { :root { --line: #3a424d; --dim: #9aa6b4; --formula: #1d2833; --note: #352d1a; } }
body { font: 16px/1.55 system-ui, "Noto Sans", "Noto Sans CJK SC", sans-serif; margin: 0 auto; max-width: 50rem;
  padding: 1.5rem; }
h1 { font-size: 1.8rem; margin: 0 0 1rem; } h2 { margin: 3rem 0 .5rem; } h3 { margin: 2.2rem 0 .6rem; }
h3 { border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
nav { columns: 2; font-size: .95rem; } nav p { margin: 0; break-inside: avoid; } nav .part { font-weight: 600; }
.formula { background: var(--formula); border-left: 3px solid #3182bd; padding: .4rem .8rem; margin: .8rem 0;
  white-space: pre-wrap; font: 14px/1.6 ui-monospace, "DejaVu Sans Mono", "Noto Sans Mono CJK SC", monospace; }
.note { background: var(--note); border-left: 3px solid #c98a00; padding: .4rem .8rem; font-size: .92rem; }
figure { margin: .8rem 0; overflow-x: auto; } figcaption { font-weight: 600; font-size: .95rem; }
figcaption span { color: var(--dim); font-weight: 400; }
table { border-collapse: collapse; margin: .3rem 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
td, th { padding: .12rem .7rem; text-align: left; } th { color: var(--dim); font-weight: 500; }
.matrix td { text-align: right; } .matrix thead th { text-align: right; }
.matrix tbody { border-left: 1px solid var(--dim); border-right: 1px solid var(--dim); }
.words thead { border-bottom: 1px solid var(--line); }
svg { max-width: 100%; height: auto; } svg text { font: 13px ui-monospace, "DejaVu Sans Mono", "Noto Sans Mono CJK SC",
  "Noto Sans CJK SC", monospace; } svg text:not([fill]) { fill: currentColor; }
"""


def make_page(walk: Walk) -> str:
    """Return the walk as a whole HTML document."""
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "title").text = walk.title
    SubElement(head, "style").text = _STYLE
    body = SubElement(html, "body")
    SubElement(body, "h1").text = walk.title
    _add_contents(body, walk)
    for number, part in enumerate(walk.parts):
        _add_part(body, number, part)
    return f"<!DOCTYPE html>\n{tostring(html, encoding='unicode', method='html')}\n"


def _add_contents(body: Element, walk: Walk) -> None:
    contents = SubElement(body, "nav")
    for number, part in enumerate(walk.parts):
        SubElement(contents, "p", {"class": "part"}).text = part.title
        for index, chapter in enumerate(part.chapters):
            link = SubElement(SubElement(contents, "p"), "a", href=f"#{_anchor(number, index)}")
            link.text = chapter.title


def _anchor(part: int, chapter: int) -> str:
    return f"part-{part}-chapter-{chapter}"


def _add_part(body: Element, number: int, part: Part) -> None:
    SubElement(body, "h2").text = part.title
    SubElement(body, "p").text = part.introduction
    for index, chapter in enumerate(part.chapters):
        _add_chapter(body, _anchor(number, index), chapter)


def _add_chapter(body: Element, anchor: str, chapter: Chapter) -> None:
    section = SubElement(body, "section", id=anchor)
    SubElement(section, "h3").text = chapter.title
    for block in chapter.blocks:
        _add_block(section, block)


def _add_block(section: Element, block: Block) -> None:
    if isinstance(block, Text):
        SubElement(section, "p").text = block.text
    elif isinstance(block, Note):
        SubElement(section, "p", {"class": "note"}).text = block.text
    elif isinstance(block, Formula):
        SubElement(section, "p", {"class": "formula"}).text = block.text
    elif isinstance(block, Matrix):
        _add_matrix(_figure(section, block.name, block.shape_text), block)
    elif isinstance(block, Heatmap):
        _figure(section, block.name).append(heatmap_picture(block))
    elif isinstance(block, Distribution):
        _figure(section, block.name).append(distribution_picture(block))
    else:
        _add_table(section, block)


def _figure(section: Element, name: str, remark: str = "") -> Element:
    figure = SubElement(section, "figure")
    caption = SubElement(figure, "figcaption")
    caption.text = f"{name} " if remark else name
    if remark:
        SubElement(caption, "span").text = remark
    return figure


def _add_matrix(figure: Element, matrix: Matrix) -> None:
    table = SubElement(figure, "table", {"class": "matrix"})
    cells = matrix.cells()
    if matrix.columns:
        _add_row(SubElement(table, "thead"), cells[0], ["th"] * len(cells[0]))
        cells = cells[1:]
    body = SubElement(table, "tbody")
    for row in cells:
        _add_row(body, row, ["th", *["td"] * (len(row) - 1)])


def _add_table(section: Element, table: Table) -> None:
    element = SubElement(SubElement(section, "figure"), "table", {"class": "words"})
    _add_row(SubElement(element, "thead"), table.columns, ["th"] * len(table.columns))
    body = SubElement(element, "tbody")
    for row in table.rows:
        _add_row(body, row, ["td"] * len(row))


def _add_row(parent: Element, cells: Sequence[str], tags: Sequence[str]) -> None:
    row = SubElement(parent, "tr")
    for cell, tag in zip(cells, tags, strict=True):
        SubElement(row, tag).text = cell
