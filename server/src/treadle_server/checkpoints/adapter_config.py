"""adapter_config.json as PEFT writes it: what of it treadle computes, and what it refuses by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from treadle_server.checkpoints.config_file import read_json_object
from treadle_server.errors import CheckpointError, UnsupportedModelError

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Wider than any that helps; a rank from a file is a size of arrays.
MAX_RANK = 4096

# Settings that say nothing of the arithmetic: where the adapter is from, how it was trained, which modules were chosen
# (the tensors tell), how Conv1D is stored (the model's files tell).
_SILENT = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "lora_dropout", "loftq_config", "eva_config", "lora_ga_config", "velora_config", "megatron_core",
    "exclude_modules", "layers_pattern", "fan_in_fan_out", "runtime_config", "qalora_group_size",
    "ensure_weight_tying",
})  # fmt: skip
_READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "layers_to_transform", "init_lora_weights", "bias",
})  # fmt: skip
# Ways to begin that leave the model's own weights as they are; others (pissa, olora, corda, lora_ga) change them.
_SOUND_STARTS = (True, False, "gaussian", "eva", "orthogonal")
# PEFT reads keys of its patterns as regular expressions; plain names are all that anybody needs, and never run away.
_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_.]+")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter.

    Attributes:
        rank: of every module that `rank_pattern` does not name.
        alpha: of every module that `alpha_pattern` does not name; the scale is alpha / rank.
        rank_stabilized: the scale is alpha / sqrt(rank) (Kalajdzievski 2023).
        rank_pattern, alpha_pattern: by module name or the end of one.
        targets: names of modules, or ends of them; None when a regular expression chose them.
        layers: the layers that were chosen; None for all.
    """

    rank: int
    alpha: float
    rank_stabilized: bool = False
    rank_pattern: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    alpha_pattern: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    targets: frozenset[str] | None = None
    layers: tuple[int, ...] | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's two matrices is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def chose(self, module: str) -> bool:
        """Tell whether a module with tensors can be one that the settings chose; PEFT would leave another out."""
        if self.targets is not None and module in self.targets:
            return True
        layer = _LAYER.search(f".{module}.")
        if self.layers is not None and (layer is None or int(layer[1]) not in self.layers):
            return False
        return self.targets is None or not self.targets.isdisjoint(_ends(module))


def _ends(module: str) -> set[str]:
    """Return a name and what is left of it behind each dot."""
    parts = module.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key that is a module's name behind a ^, or an end of it."""
    found = {key for key in (f"^{module}", *_ends(module)) if key in pattern}
    return pattern[next(key for key in pattern if key in found)] if found else default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises UnsupportedModelError for arithmetic that treadle lacks, naming the setting."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {CONFIG_NAME}, so it is not an adapter's folder")
    values = read_json_object(path)
    if values.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {values.get('peft_type')!r:.80}; treadle has LORA alone")
    _refuse_others(path, values)
    return AdapterConfig(
        int(_number(path, "r", values.get("r"), whole=True)),
        _number(path, "lora_alpha", values.get("lora_alpha", 8)),
        _flag(path, "use_rslora", values.get("use_rslora", False)),
        _pattern(path, "rank_pattern", values.get("rank_pattern"), whole=True),
        _pattern(path, "alpha_pattern", values.get("alpha_pattern")),
        _targets(path, values.get("target_modules")),
        _layers(path, values.get("layers_to_transform")),
    )


def _refuse_others(path: Path, values: Mapping[str, object]) -> None:
    if values.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias is {values['bias']!r:.80}; treadle has adapters without biases")
    start = values.get("init_lora_weights", True)
    if start is not None and start not in _SOUND_STARTS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {start!r:.80}, which changes the model's own weights; "
            "convert the adapter with PEFT (path_initial_model_for_weight_conversion)"
        )
    for name, value in values.items():
        if name not in _SILENT and name not in _READ and value:
            raise UnsupportedModelError(f"{path}: {name} is {value!r:.80}, which treadle does not have")


def _number(path: Path, name: str, value: object, *, whole: bool = False) -> int | float:
    if whole and type(value) is int and 1 <= value <= MAX_RANK:
        return value
    if not whole and type(value) in (int, float) and math.isfinite(value) and value > 0:  # type: ignore[arg-type, operator]
        return value  # type: ignore[return-value]
    expected = f"a whole number from 1 to {MAX_RANK}" if whole else "a number over 0"
    raise CheckpointError(f"{path}: {name} must be {expected}, but is {value!r:.80}")


def _flag(path: Path, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} must be true or false, but is {value!r:.80}")
    return value


def _pattern(path: Path, name: str, value: object, *, whole: bool = False) -> Mapping[str, float]:
    if not value:
        return MappingProxyType({})
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: {name} must be an object, but is {value!r:.80}")
    for key in value:
        if not _PLAIN_KEY.fullmatch(key):
            raise UnsupportedModelError(f"{path}: {name} has the key {key!r:.80}; treadle reads names of modules alone")
    return MappingProxyType({key: _number(path, f"{name}[{key}]", one, whole=whole) for key, one in value.items()})


def _targets(path: Path, value: object) -> frozenset[str] | None:
    """Return the names; a string is `all-linear` or a regular expression, which is not run: the tensors tell."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CheckpointError(f"{path}: target_modules must be names or an expression, but is {value!r:.80}")
    return frozenset(value)


def _layers(path: Path, value: object) -> tuple[int, ...] | None:
    layers = [value] if isinstance(value, int) else value
    if not layers:
        return None
    if not isinstance(layers, list) or not all(type(one) is int for one in layers):
        raise CheckpointError(f"{path}: layers_to_transform must be whole numbers, but is {value!r:.80}")
    return tuple(layers)
