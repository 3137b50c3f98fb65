"""What a stage is told: of the model at admission (`ModelInfo`), of the request at every token (`SamplingContext`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from treadle_plugin_api.drawing import Draw, draw
from treadle_plugin_api.logits import Ids, Logits
from treadle_plugin_api.random import stage_key, stream_key, uniform, uniforms

_T = TypeVar("_T")


class Memo:
    """What stages prepared for a model, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` returned at the first call with this key; where it raised, the next call tries again."""
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return cast("_T", self._made[key])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model a request is for, as `Stage.check` sees it.

    Attributes:
        name: the model's name in the server.
        vocab_size: length of a row of logits: every token that can be sampled, without a model's padding.
        context_length: the most tokens, prompt and output together, that the model can hold.
        eos_ids: ids that end a text.
        token_bytes: the bytes a token stands for, by its id; of a special token those of its name.
        encode: token ids of a text, without special tokens.
        special_ids: ids that are no part of a text, such as BOS or the end of a turn.
        text_is_bytes: whether a text is the bytes of its tokens, one after the other; False for vocabularies of whole
            words, between which spaces are put.
        memo: where `once` keeps what it made.
    """

    name: str
    vocab_size: int
    context_length: int
    eos_ids: Collection[int]
    token_bytes: Callable[[int], bytes]
    encode: Callable[[str], Sequence[int]]
    special_ids: Collection[int] = frozenset()
    text_is_bytes: bool = True
    memo: Memo = field(default_factory=Memo, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` returns, made once for the model and kept as long as it is: tables of the whole vocabulary.

        Begin the key with the name of your package. Nothing of a request may be in it, or every request adds to what is
        kept.
        """
        return self.memo.once(key, make)


class SamplingContext:
    """One choice of one request, at the token being sampled.

    Authors read the attributes and call `token_bytes`, `uniform`, `draw` and `empty`; `append`, `enter` and `fork` are
    for the engine, and for tests that play the engine.

    Attributes:
        prompt_ids: [prompt] int64, read-only.
        eos_ids: ids that end a text.
        stop_ids: the request's own stop token ids.
        vocab_size: length of a row of logits: every token that can be sampled, without a model's padding.
    """

    __slots__ = (
        "_choice_index", "_key", "_num_drawn", "_num_outputs", "_outputs", "_seed", "_stage", "_token_bytes",
        "allocate", "drawer", "eos_ids", "prompt_ids", "stop_ids", "vocab_size",
    )  # fmt: skip

    def __init__(
        self,
        *,
        vocab_size: int,
        prompt_ids: Sequence[int] | Ids = (),
        output_ids: Sequence[int] | Ids = (),
        eos_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        token_bytes: Callable[[int], bytes] | None = None,
        seed: int = 0,
        choice_index: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.prompt_ids = _read_only(np.array(prompt_ids, dtype=np.int64))
        self.eos_ids = frozenset(eos_ids)
        self.stop_ids = frozenset(stop_ids)
        self.allocate: Callable[[], Logits] | None = None
        self.drawer: Draw = draw
        self._num_outputs = len(output_ids)
        self._outputs = np.array(output_ids, dtype=np.int64)
        self._token_bytes = token_bytes
        self._seed, self._choice_index = seed, choice_index
        self._stage, self._num_drawn = stage_key(""), 0
        self._key: int | None = None

    @property
    def output_ids(self) -> Ids:
        """Ids sampled so far, [outputs] int64, read-only."""
        return _read_only(self._outputs[: self._num_outputs])

    @property
    def num_outputs(self) -> int:
        """How many tokens were sampled so far."""
        return self._num_outputs

    @property
    def position(self) -> int:
        """Absolute position of the token being sampled: the number of prompt and output tokens before it."""
        return len(self.prompt_ids) + self._num_outputs

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; part of a character is possible."""
        return self._token_bytes(token_id) if self._token_bytes is not None else b""

    @overload
    def uniform(self) -> float: ...
    @overload
    def uniform(self, size: int | tuple[int, ...]) -> NDArray[np.float64]: ...
    def uniform(self, size: int | tuple[int, ...] | None = None) -> float | NDArray[np.float64]:
        """One uniform of the open interval (0, 1), or an array of them (float64, of shape `size`).

        They depend on seed, choice, position, stage and how many were drawn before in this call, and on nothing else.
        """
        if self._key is None:
            self._key = stream_key(self._seed, self._choice_index, self.position, self._stage)
        first, count = self._num_drawn, 1 if size is None else int(np.prod(size))
        self._num_drawn += count
        if size is None:
            return uniform(self._key, first)
        return uniforms(self._key, first, count).reshape(size)

    def draw(self, logits: Logits) -> tuple[int, float]:
        """Draw from softmax of `logits` [n] float32 by the next uniform u: the index, and its probability.

        The first one, in ascending order, at which the running sum of weights exceeds the share u of all. Masked ones
        are never drawn. Raises ValueError unless there are 1 to `vocab_size` logits, one of them finite, none NaN or
        +inf.
        """
        row = np.asarray(logits, np.float32)
        if row.ndim != 1 or not 1 <= len(row) <= self.vocab_size:
            raise ValueError(f"a draw needs a row of 1 to {self.vocab_size} logits, but got the shape {row.shape}")
        return self.drawer(row, self.uniform(), self.empty)

    def empty(self) -> Logits:
        """Lend an output buffer, [vocab] float32, holding anything: the stage's until it returns."""
        return self.allocate() if self.allocate is not None else np.empty(self.vocab_size, dtype=np.float32)

    def enter(self, stage: int) -> None:
        """Start the draws of one call from 0; `stage` is the stage's `random.stage_key`."""
        self._stage, self._key, self._num_drawn = stage, None, 0

    def fork(self) -> SamplingContext:
        """A copy that goes on by itself, with the same draws."""
        return SamplingContext(
            vocab_size=self.vocab_size,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            eos_ids=self.eos_ids,
            stop_ids=self.stop_ids,
            token_bytes=self._token_bytes,
            seed=self._seed,
            choice_index=self._choice_index,
        )

    def append(self, token_id: int) -> None:
        """Add a sampled token to `output_ids`, which moves `position` on."""
        if self._num_outputs == len(self._outputs):
            grown = np.empty(max(64, 2 * self._num_outputs), dtype=np.int64)
            grown[: self._num_outputs] = self._outputs
            self._outputs = grown
        self._outputs[self._num_outputs] = token_id
        self._num_outputs += 1
        self._key = None


def _read_only(array: Ids) -> Ids:
    view = array.view()
    view.flags.writeable = False
    return view
