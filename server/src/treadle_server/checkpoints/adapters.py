"""LoRA adapters as PEFT lays them out: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight [rank, in]
    base_model.model.<module>.lora_B.weight [out, rank]

A module is a matrix of the model's files, which may hold several canonical parameters (q, k, v in one): they share A,
and each has its rows of B, found through the family's table. Both are as here also where the file stores its matrix
transposed (GPT-2's Conv1D). In memory the arrays of an adapter are called after canonical parameters:
`layers.0.attention.q.lora_A` (of a module, after its first parameter) and `.lora_B`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import DTypeLike
from treadle_plugin_api.backend import Adapter, Array, LowRank, Weight
from treadle_plugin_api.family import TensorEntry

from treadle_server.checkpoints.adapter_config import CONFIG_NAME, TENSORS_NAME, AdapterConfig, read_adapter_config
from treadle_server.checkpoints.loading import Checkpoint, FileWeight
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.checkpoints.saving import to_file_tensor
from treadle_server.errors import CheckpointError, CheckpointWriteError, UnsupportedModelError
from treadle_server.model.adapters import adaptable
from treadle_server.model.params import Params

PREFIX = "base_model.model."
_KEY = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix of the model's files that an adapter can change.

    Attributes:
        name: what PEFT calls it, as transformers does: `model.layers.0.self_attn.q_proj`.
        entry: its place in the files.
        rows: rows of each of its canonical parameters.
        num_inputs: columns.
    """

    name: str
    entry: TensorEntry
    rows: tuple[int, ...]
    num_inputs: int

    @property
    def a_name(self) -> str:
        """What its A is called in memory."""
        return factor_name(self.entry.params[0], "A")

    def factors(self) -> tuple[TensorEntry, TensorEntry]:
        """Return the places of its A and B in an adapter's file, in a family's terms."""
        rows_of_b = tuple(factor_name(param, "B") for param in self.entry.params)
        name = PREFIX + self.name
        return (
            TensorEntry(f"{name}.lora_A.weight", (self.a_name,)),
            TensorEntry(f"{name}.lora_B.weight", rows_of_b, groups=self.entry.groups),
        )


def factor_name(param: str, factor: str) -> str:
    """Return what a factor of a canonical parameter is called in memory."""
    return f"{param.removesuffix('.weight')}.lora_{factor}"


def modules_of(checkpoint: Checkpoint) -> dict[str, Module]:
    """Return every matrix that an adapter can change, by name: attention and feed-forwards, experts' included.

    Matrices that the files stack (experts as one tensor) are no modules and have no adapters.
    """
    shapes, prefix = adaptable(checkpoint.config), checkpoint.family.optional_prefix
    modules: dict[str, Module] = {}
    for entry in checkpoint.table:
        if not entry.stacked and all(param in shapes for param in entry.params):
            name = prefix + entry.file_name.removeprefix(prefix).removesuffix(".weight")
            rows = tuple(shapes[param][0] for param in entry.params)
            modules[name] = Module(name, entry, rows, shapes[entry.params[0]][1])
    return modules


def read_adapter(folder: Path, checkpoint: Checkpoint, dtype: DTypeLike = np.float32, *, name: str = "") -> Adapter:
    """Read an adapter for a model, whose checkpoint may be closed; arrays are widened to `dtype`.

    Raises CheckpointError for an adapter that is broken or of another model, and UnsupportedModelError for one whose
    arithmetic treadle does not have, naming file, tensor or setting.
    """
    config = read_adapter_config(folder)
    with closing(_open(folder)) as file:
        found = _find_modules(file, checkpoint, config)
        deltas: dict[str, LowRank] = {}
        for module, named in found.items():
            deltas |= _read_module(file, module, named, config, np.dtype(dtype))
    return Adapter(name or folder.name, MappingProxyType(deltas))


def write_adapter(folder: Path, adapter: Adapter, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Write an adapter that PEFT loads, into a folder that is there; numbers are rounded to `dtype` if it is given.

    Raises CheckpointError when it cannot be written, or changes a part of a fused matrix as PEFT cannot say.
    """
    modules = modules_changed(adapter, checkpoint)
    arrays = adapter_arrays(adapter, modules)
    weights = Params.from_arrays(arrays)
    tensors = {entry.file_name: to_file_tensor(entry, weights, dtype) for entry in adapter_table(modules)}
    write_safetensors(folder / TENSORS_NAME, tensors)
    settings = json.dumps(_settings(adapter, modules, checkpoint), indent=2, sort_keys=True)
    try:
        (folder / CONFIG_NAME).write_text(settings + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointWriteError(f"{folder / CONFIG_NAME}: cannot be written: {error}") from error


def modules_changed(adapter: Adapter, checkpoint: Checkpoint) -> list[Module]:
    """Return the modules that an adapter changes; raise CheckpointError where PEFT's layout cannot say it."""
    modules = [
        module
        for module in modules_of(checkpoint).values()
        if any(param in adapter.deltas for param in module.entry.params)
    ]
    said = {param for module in modules for param in module.entry.params}
    if said != adapter.deltas.keys():
        wrong = min(said ^ adapter.deltas.keys())
        raise CheckpointError(
            f"adapter {adapter.name!r} cannot be written: {wrong!r} is a part of a module, or of none"
        )
    for module in modules:
        deltas = [adapter.deltas[param] for param in module.entry.params]
        if any(delta.a is not deltas[0].a or delta.scale != deltas[0].scale for delta in deltas):
            raise CheckpointError(
                f"adapter {adapter.name!r} cannot be written: the parts of {module.name!r} must share A and the scale"
            )
    return modules


def adapter_table(modules: Iterable[Module]) -> tuple[TensorEntry, ...]:
    """Return the places of the arrays of an adapter of these modules in its file."""
    return tuple(entry for module in modules for entry in module.factors())


def adapter_arrays(adapter: Adapter, modules: Iterable[Module]) -> dict[str, Array]:
    """Return the arrays of an adapter of these modules under their names in memory; none is copied."""
    arrays: dict[str, Array] = {}
    for module in modules:
        arrays[module.a_name] = adapter.deltas[module.entry.params[0]].a
        arrays |= {factor_name(param, "B"): adapter.deltas[param].b for param in module.entry.params}
    return arrays


def merge_adapter(params: Mapping[str, Weight], adapter: Adapter) -> Params:
    """Return parameters W + scale * B @ A; each sum is made when it is asked for and has the dtype of its W."""
    changed = {name: _MergedWeight(params[name], delta) for name, delta in adapter.deltas.items()}
    return Params({**params, **changed})


class _MergedWeight(Weight):
    """A parameter with a change of low rank added."""

    def __init__(self, weight: Weight, delta: LowRank) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._weight, self._delta = weight, delta

    def read_into(self, out: Array) -> None:
        self._weight.read_into(out)
        out += self._delta.scale * (self._delta.b @ self._delta.a)

    def view(self) -> Array:
        stored = self._weight.view()
        wide = np.empty(self.shape, np.float64 if self.dtype == "float64" else np.float32)
        self.read_into(wide)
        return wide.astype(stored.dtype, copy=False)


# ---- reading ----------------------------------------------------------------------------------------------------


def _open(folder: Path) -> SafetensorsFile:
    if not (folder / TENSORS_NAME).is_file():
        pickle = folder / "adapter_model.bin"
        hint = f"; {pickle.name} is a pickle and is never opened, save it as safetensors" if pickle.exists() else ""
        raise CheckpointError(f"{folder}: has no {TENSORS_NAME}{hint}")
    return SafetensorsFile(folder / TENSORS_NAME)


def _find_modules(file: SafetensorsFile, checkpoint: Checkpoint, config: AdapterConfig) -> dict[Module, str]:
    """Return the modules that the file has tensors of, each with its name there; refuse everything else."""
    known, prefix = modules_of(checkpoint), checkpoint.family.optional_prefix
    found: dict[Module, str] = {}
    for key in file.tensors:
        match = _KEY.fullmatch(key)
        if match is None:
            raise UnsupportedModelError(
                f"{file.path}: tensor {key!r} is no LoRA factor of a matrix; treadle has no other"
            )
        named = match["module"]
        module = known.get(named) or known.get(prefix + named)  # without: it was made for the model without a head
        if module is None:
            raise UnsupportedModelError(f"{file.path}: tensor {key!r}: {_why_not(checkpoint, prefix, named)}")
        if not config.chose(named):
            raise CheckpointError(f"{file.path}: tensor {key!r} is of a module that {CONFIG_NAME} does not choose")
        if found.setdefault(module, named) != named:
            raise CheckpointError(f"{file.path}: module {named!r} is there under two names")
    if not found:
        raise CheckpointError(f"{file.path}: holds no tensors, so it changes nothing")
    return found


def _why_not(checkpoint: Checkpoint, prefix: str, module: str) -> str:
    names = {entry.file_name.removeprefix(prefix) for entry in checkpoint.table}
    if f"{module.removeprefix(prefix)}.weight" in names or module.removeprefix(prefix) in names or module == "lm_head":
        return "only matrices of attention and of feed-forwards can have adapters"
    return f"the model in {checkpoint.folder} has no such matrix; the adapter is of another model"


def _read_module(
    file: SafetensorsFile, module: Module, named: str, config: AdapterConfig, dtype: np.dtype[np.generic]
) -> dict[str, LowRank]:
    """Return a module's change of each of its parameters, which share A."""
    rank = config.rank_of(named)
    a_name, b_name = (f"{PREFIX}{named}.lora_{factor}.weight" for factor in "AB")
    _check_shape(file, a_name, (rank, module.num_inputs))
    _check_shape(file, b_name, (sum(module.rows), rank))
    a = _read(file, FileWeight(file, a_name, (rank, module.num_inputs), 0), a_name, dtype)
    groups, first_row, deltas = module.entry.groups, 0, {}
    for param, rows in zip(module.entry.params, module.rows, strict=True):
        weight = FileWeight(file, b_name, (rows, rank), first_row // groups, groups=groups)
        deltas[param] = LowRank(a, _read(file, weight, b_name, dtype), config.scale_of(named))
        first_row += rows
    return deltas


def _check_shape(file: SafetensorsFile, name: str, expected: tuple[int, int]) -> None:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing: a factor without the other")
    if file.tensors[name].shape != expected:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} must have shape {list(expected)} by {CONFIG_NAME} and the model, "
            f"but has {list(file.tensors[name].shape)}"
        )


def _read(file: SafetensorsFile, weight: Weight, name: str, dtype: np.dtype[np.generic]) -> Array:
    array = np.empty(weight.shape, dtype)
    weight.read_into(array)
    if not np.isfinite(array).all():
        raise CheckpointError(f"{file.path}: tensor {name!r} has a NaN or an infinity")
    array.flags.writeable = False
    return array


# ---- writing ----------------------------------------------------------------------------------------------------


def _settings(adapter: Adapter, modules: Sequence[Module], checkpoint: Checkpoint) -> dict[str, object]:
    """Return adapter_config.json."""
    deltas = {module.name: adapter.deltas[module.entry.params[0]] for module in modules}
    ranks = {name: len(delta.a) for name, delta in deltas.items()}
    alphas = {name: _alpha(delta) for name, delta in deltas.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint.folder),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{name}": one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {f"^{name}": one for name, one in alphas.items() if one != alpha},
        "target_modules": target_names(modules, checkpoint),
        "fan_in_fan_out": any(module.entry.transposed for module in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "layers_to_transform": None,
    }


def _alpha(delta: LowRank) -> int | float:
    """Return the shortest number that gives the scale again when it is divided by the rank."""
    rank = len(delta.a)
    for alpha in (round(delta.scale * rank), float(f"{delta.scale * rank:.12g}")):
        if alpha / rank == delta.scale:
            return alpha
    return delta.scale * rank


def target_names(modules: Iterable[Module], checkpoint: Checkpoint) -> list[str]:
    """Return short names that choose these modules and no other matrix of the model, as PEFT chooses by ends."""
    wanted = {module.name for module in modules}
    every = {entry.file_name.removesuffix(".weight") for entry in checkpoint.table}
    prefix = checkpoint.family.optional_prefix
    others = {prefix + name.removeprefix(prefix) for name in every} - wanted
    names: set[str] = set()
    for name in wanted:
        parts = name.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        names.add(next((end for end in ends if not any(f".{one}".endswith(f".{end}") for one in others)), name))
    return sorted(names)
