"""Looks inside one forward pass: the named intermediates of a prompt, as the backend's `observe` gives them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from treadle_plugin_api.backend import Batch

from treadle_server.engine.engine import Engine
from treadle_server.engine.weights import LoadedAdapter, deltas_of
from treadle_server.engine.worker import EngineWorker
from treadle_server.errors import EngineError
from treadle_server.language_model.validation import RequestLimits, check_trace, check_trace_size, refuse

Array = npt.NDArray[Any]

# Two short passes of different length tell every name, and which dimensions of its shape grow with the tokens.
_PROBE_LENGTHS = (2, 3)
# What a pass may work before the streams have a step, and the rows of its end: logits over a vocabulary take long.
_TURN_S = 0.025
_HEAD_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Mapping[str, Array]):
    """The intermediates of one pass by name, in the order in which they were computed.

    Attributes:
        token_ids: the tokens that the pass saw.
        weight_version: version of the weights it was made with.
        tensors: the arrays; `[tokens, ...]`, or `[heads, tokens, ...]` for those of each head.
    """

    token_ids: tuple[int, ...]
    weight_version: int
    tensors: Mapping[str, Array] = field(repr=False)

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the probes found out about one intermediate: its shapes at both lengths, and the bytes of a number."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    item_bytes: int

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes at that many tokens: each dimension grows with them or does not."""
        short, long = self.shapes
        steps = num_tokens - _PROBE_LENGTHS[0]
        return self.item_bytes * prod(a + (b - a) * steps for a, b in zip(short, long, strict=True))


class Tracer:
    """Traces passes of one model, with the weights of the moment. `begin` may be called from any thread but its own."""

    def __init__(self, engine: Engine, limits: RequestLimits, worker: EngineWorker) -> None:
        self._engine = engine
        self._limits = limits
        self._worker = worker
        self._kinds: Mapping[str, _Kind] = {}

    def begin(
        self, token_ids: Sequence[int], layers: Sequence[int], what: Sequence[str], adapter: LoadedAdapter | None
    ) -> Future[Trace]:
        """Check what is asked for and queue the pass; see `LanguageModel.trace`."""
        check_trace(len(token_ids), layers, what, self._engine.weights.decoder.config.num_layers, self._limits)
        if not self._kinds:
            self._kinds = self._worker.call(self._probe).result()
        names = _select(self._kinds, frozenset(layers), what)
        check_trace_size(sum(self._kinds[name].num_bytes(len(token_ids)) for name in names), self._limits)
        return self._worker.call(lambda: self._trace(token_ids, names, adapter))

    def _trace(self, token_ids: Sequence[int], names: frozenset[str], adapter: LoadedAdapter | None) -> Trace:
        tensors = self._run(token_ids, names, adapter)
        return Trace(tuple(token_ids), self._engine.weights.version, tensors)

    def _probe(self) -> Mapping[str, _Kind]:
        short, long = (self._run([0] * length, None) for length in _PROBE_LENGTHS)
        return {
            name: _Kind((array.shape, long[name].shape), array.itemsize)
            for name, array in short.items()
            if name in long
        }

    def _run(
        self, token_ids: Sequence[int], names: frozenset[str] | None, adapter: LoadedAdapter | None = None
    ) -> dict[str, Array]:
        """Return the named intermediates of a pass over the tokens, all of them if None."""
        seen: dict[str, list[Array]] = {}
        turns = _Turns(self._worker.step)

        def observe(name: str, array: Array) -> None:
            if names is None or name in names:
                seen.setdefault(name, []).append(array)
            turns.offer()

        decoder = self._engine.weights.decoder
        batch = Batch.of([token_ids], adapters=[deltas_of(adapter)])
        try:
            with np.errstate(all="ignore"):  # what is not finite is there to be seen
                hidden = decoder.forward(batch, observe=observe)
                if names is None or names - seen.keys():
                    for start in range(0, len(hidden), _HEAD_ROWS):
                        decoder.head(hidden[start : start + _HEAD_ROWS], observe)
                return {name: np.concatenate(parts) for name, parts in seen.items()}
        except MemoryError as error:
            raise EngineError("the server ran out of memory") from error


class _Turns:
    """Lets the engines have a step whenever a pass has worked for a while, so that no stream waits for all of it.

    A decoder and its backend keep nothing between two calls, so other passes may run while one waits.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._began_s = time.perf_counter()

    def offer(self) -> None:
        """Step the engines if it is their turn."""
        if time.perf_counter() - self._began_s >= _TURN_S:
            self._step()
            self._began_s = time.perf_counter()


def _select(known: Mapping[str, object], layers: frozenset[int], what: Sequence[str]) -> frozenset[str]:
    """Return the known names in the layers (and outside all layers) that a pattern picks."""
    for index, pattern in enumerate(what):
        if not any(_picks(pattern, name) for name in known):
            raise refuse(f"what[{index}]", "trace_unknown", value=pattern, known=", ".join(_generic(known)))
    names = frozenset(
        name
        for name in known
        if _in_layers(name, layers) and (not what or any(_picks(pattern, name) for pattern in what))
    )
    if not names:
        raise refuse("what", "trace_nothing", layers=", ".join(map(str, sorted(layers))))
    return names


def _picks(pattern: str, name: str) -> bool:
    """Tell whether a pattern fits whole dotted parts of a name: `attention`, `weights`, `layers.3`, `*norm`."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _in_layers(name: str, layers: frozenset[int]) -> bool:
    return not layers or not name.startswith("layers.") or int(name.split(".")[1]) in layers


def _generic(names: Mapping[str, object]) -> list[str]:
    """Return the names with N for the number of the layer, each once, in order."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join([p[0], "N", *p[2:]]) if p[0] == "layers" else ".".join(p) for p in parts))
