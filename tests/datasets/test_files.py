"""Text, JSONL and Parquet files as documents, and what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_server.datasets import Dataset
from treadle_server.datasets.documents import Document
from treadle_server.datasets.text_source import PIECE_BYTES
from treadle_server.errors import DataError

WriteLines = Callable[..., Path]
Documents = Callable[[Dataset], list[Document]]
TWO_PARAGRAPHS = "One.\nStill one.\n\n \nTwo.\n\n"


@pytest.mark.parametrize(
    ("text_documents", "expected"),
    [
        ("file", [TWO_PARAGRAPHS]),
        ("paragraph", ["One.\nStill one.", "Two."]),
        ("line", ["One.", "Still one.", "Two."]),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_text_file_is_cut_as_told(
    tmp_path: Path, documents: Documents, text_documents: Any, expected: list[str], line_end: str
) -> None:
    """A file is one document, or its paragraphs or lines; blank ones are none, a byte order mark belongs to no text."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TWO_PARAGRAPHS.replace("\n", line_end).encode())
    read = documents(Dataset.open([path], text_documents=text_documents))
    assert [document.text for document in read] == [text.replace("\n", line_end) for text in expected]
    assert all(document.starts and document.ends for document in read)


@given(text=st.text(st.sampled_from("a猫 \n"), min_size=1, max_size=60))
def test_pieces_of_a_long_text_join_to_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """A text longer than a piece comes in several, cut between characters; only the first starts, the last ends."""
    whole = "x" + text * (3 * PIECE_BYTES // len(text.encode()))
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_text(whole, encoding="utf-8", newline="")
    dataset = Dataset.open([path])
    read = [dataset.read(index) for index in range(len(dataset))]
    assert len(read) > 1
    assert "".join(document.text for document in read) == whole
    assert [document.starts for document in read] == [True] + [False] * (len(read) - 1)
    assert [document.ends for document in read] == [False] * (len(read) - 1) + [True]


def test_lines_of_json_are_texts_or_conversations(write_lines: WriteLines, documents: Documents) -> None:
    """Each line has a text in the named field, or messages; blank lines are skipped."""
    messages = [{"role": "user", "content": "Hi", "name": "x"}]
    path = write_lines("a.jsonl", [{"text": "One.", "id": 7}, {"messages": messages}])
    path.write_text(path.read_text() + "\n \n" + '{"text": "Zwölf"}')
    one, chat, last = documents(Dataset.open([path]))
    assert (one.text, last.text) == ("One.", "Zwölf")
    assert chat.messages == [{"role": "user", "content": "Hi"}]
    assert last.origin.endswith("a.jsonl, line 5")
    named = write_lines("b.jsonl", [{"story": "Two."}])
    assert [document.text for document in documents(Dataset.open([named], field="story"))] == ["Two."]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "is no JSON"),
        (b'{"text": "\xff"}', "is no UTF-8 at byte 10 of the line"),
        (b'{"text": 5}', "'text' must be a text, but is int"),
        (rb'{"text": "a\ud800"}', r"'text' must be Unicode, but has the lone surrogate '\\ud800' at 1"),
        (b'["text"]', "must be an object with a 'text', but is list"),
        (b'{"texts": "a"}', "must have a 'text' or 'messages', but has 'texts'"),
        (b'{"messages": []}', "'messages' must be a list of one message at least"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\]\.content must be a text, but is NoneType"),
        (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', r"messages\[0\]\.content must be Unicode"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    """The error names the file, the line and what it should hold, before any training."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {words}"):
        Dataset.open([path])


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """The error names the file and the offset in it, in whichever piece it is."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * PIECE_BYTES + b"ab\xff")
    with pytest.raises(DataError, match=rf"a\.txt: is no UTF-8 at byte {5 * PIECE_BYTES + 2}"):
        Dataset.open([path])


def test_parquet_has_a_document_a_row(tmp_path: Path, documents: Documents) -> None:
    """Rows of every row group are read, those of a group as one block."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"Story {n}." for n in range(5)]}), path, row_group_size=2)
    dataset = Dataset.open([path])
    assert [document.text for document in documents(dataset)] == [f"Story {n}." for n in range(5)]
    assert dataset.read(3).origin.endswith("a.parquet, row 4")
    order = dataset.order(np.arange(5), 0, 0).tolist()
    assert abs(order.index(0) - order.index(1)) == 1


def test_parquet_has_conversations(tmp_path: Path, documents: Documents) -> None:
    """A column of messages is as good as a field of them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "Hi"}]
    parquet.write_table(pyarrow.table({"messages": [messages]}), tmp_path / "a.parquet")
    assert documents(Dataset.open([tmp_path / "a.parquet"]))[0].messages == messages


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a", None]}, r"a\.parquet, row 2: 'text' must be given, but is null"),
        ({"words": ["a"]}, r"a\.parquet: must have a column 'text' or 'messages', but has words"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    """A null names its row, a missing column those that there are."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words):
        Dataset.open([tmp_path / "a.parquet"])


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    """A file that only has the name is refused."""
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR?")
    with pytest.raises(DataError, match=r"a\.parquet: is no Parquet file"):
        Dataset.open([tmp_path / "a.parquet"])


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the error says what to install."""
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"treadle-server\[parquet\]"):
        Dataset.open([tmp_path / "a.parquet"])


def test_folders_are_read_in_the_order_of_their_names(tmp_path: Path, documents: Documents) -> None:
    """All data files in a folder and below count, others do not."""
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "a.TXT", "c.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert [document.text for document in documents(Dataset.open([tmp_path]))] == ["a.TXT", "b/2.txt", "c.txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.txt", "no such file or folder"),
        ("a.csv", r"must end in \.txt, \.jsonl, \.parquet"),
        ("folder", r"has no file that ends in \.txt"),
        ("empty.txt", "there is no document in"),
        ("empty.jsonl", "there is no document in"),
    ],
)
def test_data_that_is_not_there_is_named(tmp_path: Path, name: str, words: str) -> None:
    """A path without documents is refused by name."""
    (tmp_path / "folder").mkdir()
    for file in ("a.csv", "empty.txt", "empty.jsonl"):
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=words):
        Dataset.open([tmp_path / name])


def test_the_fingerprint_knows_every_change(write_lines: WriteLines) -> None:
    """Other content, another order and other ways to read it have other fingerprints; the same have the same."""
    one, two = write_lines("1.jsonl", [{"text": "a"}]), write_lines("2.jsonl", [{"text": "b"}])
    prints = [
        Dataset.open([one, two]).fingerprint,
        Dataset.open([two, one]).fingerprint,
        Dataset.open([one]).fingerprint,
    ]
    assert len(set(prints)) == 3
    assert Dataset.open([one, two]).fingerprint == prints[0]
    write_lines("2.jsonl", [{"text": "c"}])
    assert Dataset.open([one, two]).fingerprint != prints[0]


def test_a_file_that_is_gone_is_named(write_lines: WriteLines) -> None:
    """Data that disappears during training is an error with its name."""
    path = write_lines("a.jsonl", [{"text": "a"}])
    dataset = Dataset.open([path])
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read any more"):
        dataset.read(0)


def test_a_share_is_held_out_by_seed(write_lines: WriteLines) -> None:
    """The two parts hold every document once, and another seed holds out others."""
    dataset = Dataset.open([write_lines("a.jsonl", [{"text": "a"}] * 40)])
    training, held_out = dataset.split(0.25, 0)
    assert sorted([*training, *held_out]) == list(range(40))
    assert len(held_out) == 10
    assert held_out.tolist() != dataset.split(0.25, 1)[1].tolist()
    assert len(dataset.split(0.0, 0)[1]) == 0


def test_one_document_cannot_be_shared_out(write_lines: WriteLines) -> None:
    """A share of a single document is refused with advice."""
    with pytest.raises(DataError, match="held_out_fraction: needs two documents"):
        Dataset.open([write_lines("a.jsonl", [{"text": "a"}])]).split(0.1, 0)
