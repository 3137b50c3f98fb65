"""The contract of a compute backend, and the data that crosses it: weights, batches and cache views.

Names of dimensions in treadle's shapes: `tokens` (all new tokens of a batch, sequence after sequence), `dim`, `heads`,
`kv_heads`, `head_dim`, `capacity` (tokens a cache has room for), `rows` (any number of hidden states), `vocab`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle_plugin_api.decoder_config import DecoderConfig

Array = NDArray[Any]
Observer = Callable[[str, Array], None]
PreparedT = TypeVar("PreparedT")

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2})
# Bits of a number in the quantised formats; GROUP_SIZE consecutive numbers of a row share a scale.
QUANTISED_BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4})
GROUP_SIZE = 32


class Weight(ABC):
    """One canonical parameter, `[out, in]` for a matrix: in memory or still in its file.

    Attributes:
        shape: shape of the canonical parameter.
        dtype: name of the stored number format: `float64`, `float32`, `float16`, `bfloat16`, `int8`, `int4`.
        scales: what stored numbers are multiplied by when the format is quantised, else None; see QuantisedWeight.
    """

    shape: tuple[int, ...]
    dtype: str
    scales: Array | None = None

    @abstractmethod
    def read_into(self, out: Array) -> None:
        """Fill `out` (same shape, float32 or float64, any strides) with the values, widened exactly."""

    @abstractmethod
    def view(self) -> Array:
        """Return the values in the stored dtype, read-only, without a copy where the storage allows it.

        A weight in a file is mapped; the view can be strided (a transposed tensor) and lives as long as it is held.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored numbers."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ArrayWeight(Weight):
    """A weight in memory."""

    def __init__(self, data: Array, scales: Array | None = None) -> None:
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype.name
        self.scales = scales

    def read_into(self, out: Array) -> None:
        """Copy the array into `out`."""
        out[...] = self.data

    def view(self) -> Array:
        """Return a read-only view of the array."""
        view = self.data.view()
        view.flags.writeable = False
        return view


class QuantisedWeight(Weight):
    """A matrix of whole numbers, of which each GROUP_SIZE consecutive ones of a row are multiplied by a scale.

    Attributes:
        numbers: what `view` returns: of int8 `[out, in] int8`; of int4 `[out, (in + 1) // 2] uint8`, two numbers a
            byte, 8 more than they are, the first in the low half.
        scales: `[out, groups] bfloat16`; the last group may be shorter than the others.
    """

    scales: Array

    def __init__(self, numbers: Array, scales: Array, num_columns: int) -> None:
        self.numbers = numbers
        self.scales = scales
        self.shape = (len(numbers), num_columns)
        self.dtype = "int8" if numbers.dtype == np.int8 else "int4"

    def read_into(self, out: Array) -> None:
        """Fill `out` with the products of numbers and scales, which float32 holds exactly."""
        num_rows = max(1, (1 << 20) // max(1, self.shape[1]))  # at once, to take little memory beside `out`
        for start in range(0, self.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            scales = np.repeat(self.scales[rows].astype(out.dtype), GROUP_SIZE, axis=1)
            np.multiply(self.integers(rows), scales[:, : self.shape[1]], out=out[rows])

    def integers(self, rows: slice = slice(None)) -> NDArray[np.int8]:
        """Return the numbers of some rows, `[rows, in]`."""
        if self.dtype == "int8":
            plain: NDArray[np.int8] = self.numbers[rows]
            return plain
        packed = self.numbers[rows]
        halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)[:, : self.shape[1]]
        return halves.astype(np.int8) - np.int8(8)

    def view(self) -> Array:
        """Return the numbers as they are stored, read-only."""
        view = self.numbers.view()
        view.flags.writeable = False
        return view

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers and their scales."""
        return int(self.numbers.nbytes + self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of a matrix `[out, in]` as the product of two thin ones (Hu et al. 2021): scale * b @ a.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`.
        scale: what their product is multiplied by.
    """

    a: Array
    b: Array
    scale: float


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Changes of a model's matrices that belong together; compared by identity.

    Attributes:
        name: the name that requests use.
        deltas: by canonical parameter name, such as `layers.0.attention.q.weight`; arrays in the decoder's dtype.
    """

    name: str
    deltas: Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat ragged batch: several sequences, each with any number of new tokens (prefill chunks and decode mixed).

    Attributes:
        token_ids: `[tokens] int64`, the new tokens of sequence 0, then of sequence 1, and so on.
        starts: `[sequences + 1] int64`; sequence i owns token_ids[starts[i]:starts[i + 1]].
        prefix_lengths: `[sequences] int64`, tokens of each sequence that are in its cache already.
        prompt_lengths: `[sequences] int64`, tokens of each sequence that were there from the start, in this batch or
            in others: where angles depend on the length, all of them take those of the whole prompt, and each later
            token those of the length it reached. None: whatever a sequence has after this batch is its prompt.
        adapters: the adapter of each sequence, or None for the bare model; None: nobody has one.
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    prefix_lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64] | None = None
    adapters: tuple[Adapter | None, ...] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int] | NDArray[np.int64]],
        prefix_lengths: Sequence[int] = (),
        prompt_lengths: Sequence[int] | None = None,
        adapters: Sequence[Adapter | None] | None = None,
    ) -> Batch:
        """Make a batch from each sequence's new ids; without prefix lengths all sequences start at position 0."""
        parts = [np.asarray(ids, np.int64) for ids in sequences]
        token_ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        starts = np.array([0, *accumulate(map(len, parts))], np.int64)
        prefixes = np.asarray(prefix_lengths or [0] * len(sequences), np.int64)
        return cls(
            token_ids,
            starts,
            prefixes,
            None if prompt_lengths is None else np.asarray(prompt_lengths, np.int64),
            None if adapters is None or not any(adapters) else tuple(adapters),
        )

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.prefix_lengths)

    def positions(self) -> NDArray[np.int64]:
        """Return each new token's absolute position, `[tokens] int64`; not to be written to."""
        if self.num_tokens == self.num_sequences:  # a token of each: what a decoding step pays for, it pays every time
            return self.prefix_lengths
        offsets = self.prefix_lengths - self.starts[:-1]
        return np.arange(self.num_tokens, dtype=np.int64) + np.repeat(offsets, np.diff(self.starts))

    def lengths_reached(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each new token at `positions` the length whose angles it takes, `[tokens] int64`."""
        counts = np.diff(self.starts)
        prompts = self.prefix_lengths + counts if self.prompt_lengths is None else self.prompt_lengths
        return np.maximum(np.repeat(prompts, counts), positions + 1)


class CacheView(Protocol):
    """The keys and values of one sequence, as a backend sees them.

    `length` tokens are stored. Before a forward pass the caller makes room for the new tokens; the backend writes
    theirs at `length` onwards; afterwards the caller advances `length`. Keys are stored rotated.
    """

    @property
    def length(self) -> int:
        """Tokens stored."""

    def layer(self, index: int) -> tuple[Array, Array]:
        """Return a layer's keys and values, both `[kv_heads, capacity, head_dim]`, writable, of `cache_dtype`."""


class ComputeBackend(Protocol[PreparedT]):
    """What runs a decoder. The NumPy backend is the reference; a subclass of it overrides its primitives one by one.

    Nothing of one call may depend on another: an observer may run further passes before the one it looks at goes on.
    """

    name: str

    def prepare(self, config: DecoderConfig, params: Mapping[str, Weight]) -> PreparedT:
        """Read, fuse or pack the canonical parameters into whatever the other methods want. Writes to no weight."""

    def cache_dtype(self, prepared: PreparedT) -> np.dtype[Any]:
        """Return the number type that caches of this decoder keep keys and values in."""

    def forward(
        self, prepared: PreparedT, batch: Batch, caches: Sequence[CacheView], observe: Observer | None = None
    ) -> Array:
        """Run the layers and return `hidden [tokens, dim]`, after the final norm.

        caches[i] belongs to sequence i, holds prefix_lengths[i] tokens and has room for its new ones. Rows of a
        sequence with an adapter take the adapter's changes; the caller has checked that they fit.
        """

    def head(self, prepared: PreparedT, hidden: Array, observe: Observer | None = None) -> Array:
        """Return `logits [rows, vocab]` of `hidden [rows, dim]`."""

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same as `drawing.draw`, a loss or an optimizer, faster, or the function itself."""


class DifferentiableBackend(ComputeBackend[PreparedT], Protocol[PreparedT]):
    """A compute backend that can also train."""

    def forward_saving(
        self, prepared: PreparedT, batch: Batch, saved: dict[str, Array], recompute: bool = False
    ) -> Array:
        """Like `forward` on whole sequences; keeps in `saved` what `backward` needs.

        With recompute that is as little as can be, and `backward` works out the rest again.
        """

    def backward(
        self, prepared: PreparedT, saved: dict[str, Array], dhidden: Array, wanted: Collection[str] | None = None
    ) -> dict[str, Array]:
        """Return the wanted gradients given `dhidden [tokens, dim]`, as if hidden were all, and leave `saved` empty.

        `wanted` names canonical parameters, and the matrices of the batch's one adapter, `.lora_A` and `.lora_B` where
        the parameter has `.weight`; None stands for all. What lies behind hidden alone is left out.
        """

    def head_backward(self, prepared: PreparedT, hidden: Array, dlogits: Array, grads: dict[str, Array]) -> Array:
        """Return `dhidden [rows, dim]` given `dlogits [rows, vocab]`, and add the head's gradients to grads in place.

        grads has an array for each parameter behind hidden whose gradient is wanted; of a tied head that is the
        embedding.
        """

    def parameters(self, prepared: PreparedT) -> dict[str, Array]:
        """Return the canonical parameters as they are computed with, as views: writing to them changes the model.

        Norm scales that are stored minus one are here plus one.
        """
