"""Reading a Hugging Face config.json: typed values, errors that name the key, rotary settings in both spellings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from treadle_plugin_api.decoder_config import RotaryConfig, RotaryKind
from treadle_plugin_api.family import UnsupportedSettingError

ChoiceT = TypeVar("ChoiceT")

# No count or size in a model's configuration is larger; a bound keeps a broken file from asking for all memory.
MAX_INTEGER = (1 << 31) - 1
# Near the largest float32.
MAX_NUMBER = 1e38

# Settings of one family or another that change the arithmetic, each with the values that leave it alone. A family that
# implements one reads it; any other refuses it unless it is absent, null or neutral.
NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "alibi": (False,),
        "attention_multiplier": (),
        "attn_logit_softcapping": (),
        "clip_qkv": (),
        "embedding_multiplier": (1, 1.0),
        "final_logit_softcapping": (),
        "logit_scale": (1, 1.0),
        "logits_scaling": (1, 1.0),
        "no_rope_layers": ([],),
        "num_experts": (0,),
        "num_local_experts": (0, 1),
        "partial_rotary_factor": (1, 1.0),
        "qk_layernorm": (False,),
        "qk_norm": (False,),
        "query_pre_attn_scalar": (),
        "residual_multiplier": (1, 1.0),
        "rope_interleaved": (False,),
        "sliding_window": (),
        "use_qk_norm": (False,),
    }
)


_ROTARY_KINDS: Mapping[str, RotaryKind] = MappingProxyType(
    {
        "default": "default",
        "linear": "linear",
        "llama3": "llama3",
    }
)
_ROTARY_COMMON = frozenset({"rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"})
_ROTARY_KEYS: Mapping[RotaryKind, frozenset[str]] = MappingProxyType(
    {
        "default": _ROTARY_COMMON,
        "linear": _ROTARY_COMMON,
        "llama3": _ROTARY_COMMON | {"low_freq_factor", "high_freq_factor"},
    }
)


class HfConfig:
    """Typed access to a config.json object. Errors are ValueErrors that name key, expectation and received value."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self._values = values
        self._where = where

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the first given key's integer, from `minimum` to MAX_INTEGER."""
        value = int(self._get(keys, (int,), "an integer", default))
        if not minimum <= value <= MAX_INTEGER:
            raise ValueError(f"{self._where}{keys[0]} must be between {minimum} and {MAX_INTEGER}, but is {value}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return the first given key's finite number."""
        value = self._get(keys, (float, int), "a number", default)
        if not abs(value) < MAX_NUMBER:
            raise ValueError(f"{self._where}{keys[0]} must be finite and under {MAX_NUMBER}, but is {value}")
        return float(value)

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """Return the first given key's truth value."""
        return bool(self._get(keys, (bool,), "true or false", default))

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return the first given key's string."""
        return str(self._get(keys, (str,), "a string", default))

    def choice(self, key: str, choices: Mapping[str, ChoiceT], default: str | None = None) -> ChoiceT:
        """Return what `choices` maps the key's string to; other strings are unsupported."""
        value = self.text(key, default=default)
        if value not in choices:
            raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported; known: {sorted(choices)}")
        return choices[value]

    def refuse_unless_neutral(self, handled: Collection[str] = ()) -> None:
        """Raise UnsupportedSettingError for a setting that changes the arithmetic and is not in `handled`."""
        for key, neutral in NEUTRAL_SETTINGS.items():
            value = self._values.get(key)
            if key not in handled and value is not None and value not in neutral:
                raise UnsupportedSettingError(f"{key} {value!r} is not supported by this model type")

    def require(self, key: str, allowed: Collection[object]) -> None:
        """Raise UnsupportedSettingError when the key is given, not null, and not one of the allowed values."""
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported; known: {list(allowed)}")

    def _get(self, keys: tuple[str, ...], types: tuple[type, ...], expected: str, default: object) -> Any:
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"{self._where}{key} must be {expected}, but is {value!r}")
            return value
        if default is None:
            raise ValueError(f"{self._where}{keys[0]} is missing; it must be {expected}")
        return default

    def rotary(self) -> RotaryConfig:
        """Return the rotary settings: `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling` (4)."""
        name = "rope_parameters" if self._values.get("rope_parameters") else "rope_scaling"
        settings = _mapping(self._values, name)
        if settings.keys() == {"full_attention"}:  # transformers 5 may nest the settings per layer type
            settings = _mapping(settings, "full_attention")
        rope = HfConfig(settings, f"{name}.")
        theta = rope.number("rope_theta", default=self.number("rope_theta", default=10000.0))
        kind = rope.choice("rope_type" if "rope_type" in settings else "type", _ROTARY_KINDS, default="default")
        rope._refuse_other_keys(_ROTARY_KEYS[kind])
        if kind == "default":
            return RotaryConfig(theta=theta)
        if kind == "linear":
            return RotaryConfig(kind=kind, theta=theta, factor=rope.number("factor"))
        return RotaryConfig(
            kind=kind,
            theta=theta,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_length=rope.integer("original_max_position_embeddings"),
        )

    def _refuse_other_keys(self, known: Collection[str]) -> None:
        for key, value in self._values.items():
            if key not in known and value is not None and value not in NEUTRAL_SETTINGS.get(key, ()):
                raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported")


def _mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object, but is {value!r}")
    return value
