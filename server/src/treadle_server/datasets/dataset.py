"""The documents of several files as one numbered collection, in an order that depends on a seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle_server.datasets.documents import Document, Source
from treadle_server.datasets.json_lines_source import JsonLinesSource
from treadle_server.datasets.parquet_source import ParquetSource
from treadle_server.datasets.text_source import TextDocuments, TextSource
from treadle_server.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".parquet")

# What random numbers are for; each use has its own, so that none moves another's.
_SHUFFLING, _SPLITTING = 1, 2


class Dataset:
    """Documents by number.

    Attributes:
        fingerprint: changes when any file, their order, or what is read from them does.
    """

    def __init__(self, sources: Sequence[Source], fingerprint: str = "") -> None:
        self._sources = tuple(sources)
        self.fingerprint = fingerprint
        self._first_ids = np.cumsum([0, *(len(source.blocks) for source in self._sources)])
        self._blocks = _joined_blocks(self._sources)

    @classmethod
    def open(cls, paths: Sequence[Path], *, field: str = "text", text_documents: TextDocuments = "file") -> Dataset:
        """Open text, JSONL and Parquet files, and those in folders, in the order of their names.

        Every file is checked whole. `field` names the text in JSONL and Parquet; where it is missing, `messages` is a
        conversation. A text file is one document, or `text_documents` are its paragraphs or lines. Raises DataError.
        """
        files = _find_files(paths)
        sources: list[Source] = []
        digest = hashlib.sha256(f"{field}\n{text_documents}\n".encode())
        for path in files:
            try:
                sources.append(_open(path, field, text_documents))
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        dataset = cls(sources, digest.hexdigest())
        if not len(dataset):
            raise DataError(f"there is no document in {', '.join(map(str, paths))}")
        return dataset

    def __len__(self) -> int:
        return int(self._first_ids[-1])

    def read(self, document_id: int) -> Document:
        """Return a document by its number."""
        source = int(np.searchsorted(self._first_ids, document_id, side="right")) - 1
        try:
            return self._sources[source].read(document_id - int(self._first_ids[source]))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read any more: {error.strerror or error}") from error

    def order(self, document_ids: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        """Return document ids `[documents] int64` shuffled for an epoch; those of a block stay together."""
        random = np.random.default_rng([_SHUFFLING, seed, epoch])
        num_blocks = int(self._blocks[-1]) + 1
        block_ranks, ranks = random.permutation(num_blocks), random.permutation(len(document_ids))
        return document_ids[np.lexsort((ranks, block_ranks[self._blocks[document_ids]]))]

    def split(self, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids to train on and those to hold out, about `fraction` of all. Raises DataError for too few."""
        shuffled = np.random.default_rng([_SPLITTING, seed]).permutation(len(self))
        num_held_out = max(1, round(len(self) * fraction)) if fraction else 0
        if num_held_out >= len(self):
            raise DataError(
                f"held_out_fraction: needs two documents at least, but there is {len(self)}; "
                "name a held-out file, or let text_documents be paragraphs or lines"
            )
        return np.sort(shuffled[num_held_out:]), np.sort(shuffled[:num_held_out])


def _joined_blocks(sources: Sequence[Source]) -> NDArray[np.int64]:
    """Return the block of every document, counted over all sources."""
    blocks: list[NDArray[np.int64]] = []
    num_blocks = 0
    for source in sources:
        blocks.append(source.blocks + num_blocks)
        num_blocks += int(source.blocks[-1]) + 1 if len(source.blocks) else 0
    return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)


def _find_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise DataError(f"{path}: has no file that ends in {', '.join(SUFFIXES)}")
            files += found
        elif not path.exists():
            raise DataError(f"{path}: no such file or folder")
        elif path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: must end in {', '.join(SUFFIXES)}, which says how it is read")
        else:
            files.append(path)
    return files


def _open(path: Path, field: str, text_documents: TextDocuments) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return TextSource(path, text_documents)
    return JsonLinesSource(path, field) if suffix == ".jsonl" else ParquetSource(path, field)
