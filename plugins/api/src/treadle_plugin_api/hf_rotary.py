"""The rotary settings of a Hugging Face config.json, in every spelling, as RotaryConfig.

transformers 5 writes `rope_parameters` with everything in it, for models with layer types an object for each; older
files have `rope_theta` and `rope_scaling` with `rope_type`, or `type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from treadle_plugin_api.hf_config import LAYER_TYPES, MAX_INTEGER, HfConfig
from treadle_plugin_api.positions_config import PositionsConfig, RotaryConfig, RotaryKind

_KINDS: Mapping[str, RotaryKind] = MappingProxyType(
    {
        "default": "default",
        "linear": "linear",
        "dynamic": "dynamic",
        "yarn": "yarn",
        "llama3": "llama3",
        "longrope": "longrope",
    }
)
_COMMON = frozenset({"rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"})
_KEYS: Mapping[RotaryKind, frozenset[str]] = MappingProxyType(
    {
        "default": _COMMON,
        "linear": _COMMON,
        "dynamic": _COMMON,
        "yarn": _COMMON
        | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"},
        "llama3": _COMMON | {"low_freq_factor", "high_freq_factor"},
        "longrope": _COMMON | {"attention_factor", "short_factor", "long_factor"},
    }
)


def read_rotary(
    hf: HfConfig,
    head_dim: int,
    context_length: int,
    layer_type: str = LAYER_TYPES[0],
    *,
    theta_keys: Sequence[str] = ("rope_theta",),
    theta: float = 10000.0,
    partial_keys: Sequence[str] = ("partial_rotary_factor",),
    partial: float | None = None,
    kinds: Mapping[str, RotaryKind] = _KINDS,
    scaled: bool = True,
    interleaved: bool = False,
) -> RotaryConfig | None:
    """Return the angles of one type of layer; None for a type whose settings are null, which has none.

    Args:
        hf: the whole config.json.
        head_dim: width of a head.
        context_length: positions the model was made for.
        layer_type: which settings to take where they are nested per layer type.
        theta_keys: keys of the config that hold the base where the settings do not.
        theta: the base where neither does.
        partial_keys: keys of the config that hold the part of a head that turns where the settings do not.
        partial: that part where neither does; None when the family knows whole heads only.
        kinds: rotary types by name; a family may know names of its own.
        scaled: `rope_scaling` holds for this type of layer.
        interleaved: neighbouring dimensions turn together.
    """
    name, settings = _settings(hf, layer_type, scaled)
    if settings is None:
        return None
    rope = HfConfig(settings, f"{name}.")
    base = rope.number("rope_theta", default=hf.number(*theta_keys, default=theta))
    part = 1.0
    if partial is not None:
        part = rope.number("partial_rotary_factor", default=hf.number(*partial_keys, default=partial))
    kind = rope.choice("rope_type" if "rope_type" in settings else "type", kinds, default="default")
    rope.refuse_others(_KEYS[kind] if partial is None else _KEYS[kind] | {"partial_rotary_factor"})
    dim = int(head_dim * part)
    return RotaryConfig(
        kind=kind,
        theta=base,
        dim=None if dim == head_dim else dim,
        interleaved=interleaved,
        **_scaling(hf, rope, kind, context_length),
    )


def rotary_positions(
    hf: HfConfig, head_dim: int, context_length: int, layer_types: Sequence[str] = (), **options: Any
) -> PositionsConfig:
    """Return rotary positions, per layer where the settings of the layer types differ."""
    types = layer_types or LAYER_TYPES[:1]
    by_type = {kind: read_rotary(hf, head_dim, context_length, kind, **options) for kind in sorted(set(types))}
    return layered_positions([by_type[kind] for kind in types])


def stretched_context(context_length: int, positions: PositionsConfig) -> int:
    """Return the positions a model can use: `dynamic` and `yarn` files give those before they were stretched."""
    rotary = positions.rotary
    if rotary is None or rotary.kind not in ("dynamic", "yarn"):
        return context_length
    return int(min(max(context_length, rotary.original_context_length * rotary.factor), MAX_INTEGER))


def layered_positions(rotaries: Sequence[RotaryConfig | None]) -> PositionsConfig:
    """Return the positions of layers that turn by these angles, each, or not at all."""
    first = next((rotary for rotary in rotaries if rotary is not None), None)
    if first is None:
        return PositionsConfig(kind="none")
    uniform = all(rotary == first for rotary in rotaries)
    return PositionsConfig(kind="rotary", rotary=first, layers=() if uniform else tuple(rotaries))


def _settings(hf: HfConfig, layer_type: str, scaled: bool) -> tuple[str, Mapping[str, object] | None]:
    """Return the settings of a layer type and where they stand."""
    name = "rope_parameters" if hf.mapping("rope_parameters") else "rope_scaling"
    settings = hf.mapping(name)
    if not settings.keys() & {*LAYER_TYPES}:
        return name, settings if scaled or name == "rope_parameters" else {}
    if layer_type in settings and settings[layer_type] is None:
        return name, None
    return f"{name}.{layer_type}", HfConfig(settings, f"{name}.").mapping(layer_type)


def _scaling(hf: HfConfig, rope: HfConfig, kind: RotaryKind, context_length: int) -> dict[str, Any]:
    """Return the fields of a RotaryConfig that a kind has beside theta."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": rope.number("factor")}
    if kind == "dynamic":
        return {"factor": rope.number("factor"), "original_context_length": context_length}
    original = hf.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=context_length),
    )
    if kind == "llama3":
        bounds = {key: rope.number(key) for key in ("low_freq_factor", "high_freq_factor")}
        return {"factor": rope.number("factor"), "original_context_length": original, **bounds}
    factor = rope.number("factor", default=context_length / original)
    more = _yarn(rope, factor) if kind == "yarn" else _longrope(rope, factor, original)
    return {"factor": factor, "original_context_length": original, **more}


def _yarn(rope: HfConfig, factor: float) -> dict[str, Any]:
    return {
        "attention_factor": rope.number("attention_factor", default=_yarn_attention_factor(rope, factor)),
        "beta_fast": rope.number("beta_fast", default=32.0),
        "beta_slow": rope.number("beta_slow", default=1.0),
        "truncate": rope.flag("truncate", default=True),
    }


def _yarn_attention_factor(rope: HfConfig, factor: float) -> float:
    """Return 0.1 ln(factor) + 1, or the ratio of two such where DeepSeek's keys weight the logarithm."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


def _longrope(rope: HfConfig, factor: float, original: int) -> dict[str, Any]:
    if original < 2:
        raise ValueError(f"original_max_position_embeddings must be at least 2 for longrope, but is {original}")
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "attention_factor": rope.number("attention_factor", default=grown),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
    }
