"""Documents in a plain text file: the whole file, its paragraphs or its lines."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle_server.datasets.documents import Document
from treadle_server.errors import DataError

TextDocuments = Literal["file", "paragraph", "line"]

# A longer text is read in pieces of this size, so that no file needs to fit into memory and a long one is shuffled too.
PIECE_BYTES = 1 << 16

_SEPARATORS = MappingProxyType({"paragraph": re.compile(rb"(?:[ \t]*\r?\n){2,}"), "line": re.compile(rb"\r?\n")})
_VISIBLE = re.compile(rb"\S")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextSource:
    """A UTF-8 text file. Its bytes are checked when it is opened; raises DataError naming file and offset."""

    def __init__(self, path: Path, text_documents: TextDocuments = "file") -> None:
        self._path = path
        pieces = list(_pieces(path, text_documents))
        self._places = np.array(pieces, np.int64).reshape(-1, 4)  # start, end, starts, ends

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Every document can be read alone."""
        return np.arange(len(self._places))

    def read(self, index: int) -> Document:
        """Return one document, or one piece of a long one."""
        start, end, starts, ends = self._places[index].tolist()
        with self._path.open("rb") as file:
            file.seek(start)
            text = _decode(self._path, file.read(end - start), start)
        return Document(f"{self._path}, byte {start}", text, starts=bool(starts), ends=bool(ends))


def _pieces(path: Path, text_documents: TextDocuments) -> Iterator[tuple[int, int, bool, bool]]:
    if not path.stat().st_size:
        return
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for first, last in _documents(data, text_documents):
        start = first
        while start < last:
            end = _piece_end(data, start, last)
            _decode(path, data[start:end], start)
            yield start, end, start == first, end == last
            start = end


def _documents(data: mmap.mmap, text_documents: TextDocuments) -> Iterator[tuple[int, int]]:
    """Yield where documents start and end; those without a visible character are none."""
    start = len(_BYTE_ORDER_MARK) if data[:3] == _BYTE_ORDER_MARK else 0
    separator = _SEPARATORS.get(text_documents)
    for match in separator.finditer(data, start) if separator else ():
        if _VISIBLE.search(data, start, match.start()):
            yield start, match.start()
        start = match.end()
    if _VISIBLE.search(data, start):
        yield start, len(data)


def _piece_end(data: mmap.mmap, start: int, last: int) -> int:
    """Return where a piece ends: after a line, else before a space, else between two characters."""
    end = start + PIECE_BYTES
    if end >= last:
        return last
    after_line = data.rfind(b"\n", start, end) + 1
    if after_line > start:
        return after_line
    space = data.rfind(b" ", start + 1, end)
    if space > start:
        return space
    while data[end] & 0xC0 == 0x80 and end > start + PIECE_BYTES - 4:  # inside a character
        end -= 1
    return end


def _decode(path: Path, data: bytes, start: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 at byte {start + error.start}: {error.reason}") from error
