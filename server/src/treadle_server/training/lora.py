"""LoRA: two thin matrices beside each chosen one are trained, and the model stays as it is (Hu et al. 2021).

What is trained is what PEFT trains: a pair for each matrix of the model's files. Where a file holds q, k and v in one,
they share A, so that the saved adapter is exactly the trained one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import DTypeLike
from treadle_plugin_api.backend import Adapter, Array, LowRank
from treadle_plugin_api.random import stage_key, stream_key, uniforms

from treadle_server.checkpoints.adapter_config import MAX_RANK
from treadle_server.checkpoints.adapters import (
    Module,
    adapter_arrays,
    adapter_table,
    factor_name,
    modules_changed,
    modules_of,
    read_adapter,
    write_adapter,
)
from treadle_server.checkpoints.loading import Checkpoint
from treadle_server.errors import CheckpointError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What a new adapter is.

    Attributes:
        rank: rows of each A, columns of each B.
        alpha: alpha / rank is what the product of both is multiplied by.
        target_modules: names of matrices as in PEFT, or ends of them (`q_proj`); empty: all of attention and of the
            feed-forwards.
        seed: of the numbers that A begins with.
        dropout: must be 0: there is none in treadle.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: Sequence[str] = ()
    seed: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _require(type(self.rank) is int and 1 <= self.rank <= MAX_RANK, "rank", f"1 to {MAX_RANK}", self.rank)
        number = type(self.alpha) in (int, float) and math.isfinite(self.alpha) and self.alpha > 0
        _require(number, "alpha", "a finite number over 0", self.alpha)
        _require(type(self.seed) is int and self.seed >= 0, "seed", "a whole number, 0 or more", self.seed)
        _require(not self.dropout, "dropout", "0: training has no dropout", self.dropout)
        names = self.target_modules
        sound = not isinstance(names, str) and all(isinstance(name, str) and name for name in names)
        _require(sound, "target_modules", "a sequence of names", names)


def _require(ok: bool, field: str, expected: str, received: object) -> None:
    if not ok:
        raise InvalidRequestError.of(f"lora.{field}", f"must be {expected}, but is {received!r:.80}")


class TrainedAdapter:
    """The arrays of an adapter, in training; see `TrainedModel`."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        modules = modules_changed(adapter, checkpoint)
        self._checkpoint = checkpoint
        self.table = adapter_table(modules)
        self.arrays = {name: np.array(array) for name, array in adapter_arrays(adapter, modules).items()}
        self._parts = {module.a_name: [factor_name(param, "A") for param in module.entry.params] for module in modules}
        scales = {module.name: adapter.deltas[module.entry.params[0]].scale for module in modules}
        self.adapter = _adapter_over(adapter.name, modules, self.arrays, scales)

    def wanted(self, names: Collection[str]) -> frozenset[str]:
        """Return the gradients that the decoder is asked for."""
        return frozenset(part for name in names for part in self._parts.get(name, (name,)))

    def gather(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients of the arrays: that of a shared A is the sum of what each of its matrices says."""
        shared = {part for parts in self._parts.values() for part in parts}
        gathered = {name: gradient for name, gradient in grads.items() if name not in shared}
        for name, parts in self._parts.items():
            found = [grads[part] for part in parts if part in grads]
            if found:
                gathered[name] = found[0] if len(found) == 1 else np.sum(found, axis=0)
        return gathered

    def refresh(self) -> None:
        """Do nothing: the decoder multiplies with the arrays themselves."""

    def write(self, folder: Path, dtype: str) -> None:
        """Write the adapter in PEFT's layout."""
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, self.adapter, self._checkpoint, dtype)

    def read(self, folder: Path, exact: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of a saved adapter, those of `exact` where it has them."""
        dtype = next(iter(self.arrays.values())).dtype
        adapter = read_adapter(folder, self._checkpoint, dtype, name=self.adapter.name)
        if adapter.deltas.keys() != self.adapter.deltas.keys() or any(
            delta.scale != self.adapter.deltas[name].scale or delta.a.shape != self.adapter.deltas[name].a.shape
            for name, delta in adapter.deltas.items()
        ):
            raise CheckpointError(f"{folder}: is another adapter: its matrices, ranks or scales differ")
        found = adapter_arrays(adapter, modules_changed(adapter, self._checkpoint))
        fitting = {name: array for name, array in exact.items() if name in found and array.shape == found[name].shape}
        return {name: np.array(array, dtype) for name, array in {**found, **fitting}.items()}


def new_adapter(checkpoint: Checkpoint, config: LoraConfig, dtype: DTypeLike) -> Adapter:
    """Return an adapter that changes nothing yet: B is 0, and A is drawn as PEFT draws it (He et al. 2015).

    A's numbers depend on the seed and the module's name alone, whatever else is chosen.
    """
    modules = _choose(modules_of(checkpoint), config.target_modules)
    arrays: dict[str, Array] = {}
    for module in modules:
        drawn = uniforms(stream_key(config.seed, 0, 0, stage_key(module.name)), 0, config.rank * module.num_inputs)
        bound = module.num_inputs**-0.5
        arrays[module.a_name] = ((2 * drawn - 1) * bound).reshape(config.rank, -1).astype(dtype)
        for param, rows in zip(module.entry.params, module.rows, strict=True):
            arrays[factor_name(param, "B")] = np.zeros((rows, config.rank), dtype)
    scales = {module.name: config.alpha / config.rank for module in modules}
    return _adapter_over("trained", modules, arrays, scales)


def _choose(modules: Mapping[str, Module], targets: Sequence[str]) -> list[Module]:
    """Return the modules whose names end in a target; each must choose one at least."""
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            ends = sorted({name.rpartition(".")[2] for name in modules})
            raise InvalidRequestError.of(
                "lora.target_modules", f"must name matrices such as {', '.join(ends)}, but {target!r:.80} names none"
            )
    chosen = [one for name, one in modules.items() if any(f".{name}".endswith(f".{target}") for target in targets)]
    found = chosen if targets else list(modules.values())
    if not found:
        raise InvalidRequestError.of("lora", "cannot be used: the model's files have no matrix that takes an adapter")
    return found


def _adapter_over(
    name: str, modules: Iterable[Module], arrays: Mapping[str, Array], scales: Mapping[str, float]
) -> Adapter:
    """Return an adapter that reads these very arrays."""
    deltas = {
        param: LowRank(arrays[module.a_name], arrays[factor_name(param, "B")], scales[module.name])
        for module in modules
        for param in module.entry.params
    }
    return Adapter(name, MappingProxyType(deltas))
