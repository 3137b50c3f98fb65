"""Writes a safetensors file a piece at a time, so that no tensor need ever be whole in memory.

The format is https://huggingface.co/docs/safetensors: a header length (8 bytes, little-endian), a JSON header, then the
tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from treadle_server.errors import CheckpointError

DType = Literal["F32", "F16", "BF16"]
BYTES_PER_NUMBER: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: what the header says of it, and its numbers in order, in pieces of the header's dtype."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def num_elements(self) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensor takes in the file."""
        return self.num_elements * BYTES_PER_NUMBER[self.dtype]


def write_stream(path: Path, sources: Sequence[TensorSource], advance: Callable[[int], None]) -> None:
    """Write the tensors to a new file, calling `advance(num_bytes)` after each piece."""
    with path.open("wb") as file:
        file.write(_header(sources))
        for source in sources:
            written = 0
            for piece in source.pieces():
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
                written += piece.nbytes
                advance(piece.nbytes)
            if written != source.num_bytes:
                raise CheckpointError(
                    f"{path}: tensor {source.name!r} came to {written} bytes, {source.num_bytes} expected"
                )


def _header(sources: Iterable[TensorSource]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    offset = 0
    for source in sources:
        end = offset + source.num_bytes
        entries[source.name] = {"dtype": source.dtype, "shape": source.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    return len(text).to_bytes(8, "little") + text
