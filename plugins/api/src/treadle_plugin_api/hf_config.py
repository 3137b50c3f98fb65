"""Reading a Hugging Face config.json: typed values, errors that name the key, and a memory of what was read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from treadle_plugin_api.decoder_config import MAX_LAYERS, Activation
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
        "add_cross_attention": (False,),
        "alibi": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "attention_bias": (False,),
        "attention_multiplier": (),
        "attn_logit_softcapping": (),
        "clip_qkv": (),
        "embedding_multiplier": (1, 1.0),
        "final_logit_softcapping": (),
        "first_k_dense_replace": (0,),
        "is_encoder_decoder": (False,),
        "kv_lora_rank": (),
        "logit_scale": (1, 1.0),
        "logits_scaling": (1, 1.0),
        "mlp_bias": (False,),
        "mup_width_multiplier": (1, 1.0),
        "n_routed_experts": (0,),
        "n_shared_experts": (0,),
        "no_rope_layers": ([],),
        "num_experts": (0,),
        "num_local_experts": (0, 1),
        "parallel_attn": (False,),
        "partial_rotary_factor": (1, 1.0),
        "pruned_heads": ({},),
        "qk_layernorm": (False,),
        "qk_norm": (False,),
        "query_pre_attn_scalar": (),
        "residual_multiplier": (1, 1.0),
        "rope_interleaved": (False,),
        "rope_local_base_freq": (),
        "rotary_pct": (1, 1.0),
        "scale_attn_by_inverse_layer_idx": (False,),
        "sliding_window": (),
        "sliding_window_pattern": (),
        "use_bidirectional_attention": (False,),
        "use_parallel_residual": (False,),
        "use_qk_norm": (False,),
        "use_sliding_window": (False,),
    }
)

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_accurate": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_python": "gelu",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "gelu_quick",
        "relu": "relu",
        "relu2": "relu_squared",
        "silu": "silu",
        "swish": "silu",
    }
)

LAYER_TYPES = ("full_attention", "sliding_attention")


class HfConfig:
    """Typed access to a config.json object. Errors are ValueErrors that name key, expectation and received value."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the first given key's integer, from `minimum` to MAX_INTEGER."""
        value = int(self._get(keys, (int,), "an integer", default))
        if not minimum <= value <= MAX_INTEGER:
            raise ValueError(f"{self._where}{keys[0]} must be between {minimum} and {MAX_INTEGER}, but is {value}")
        return value

    def num_layers(self, *keys: str) -> int:
        """Return the number of layers, `num_hidden_layers` unless other keys are given, up to MAX_LAYERS."""
        keys = keys or ("num_hidden_layers",)
        value = self.integer(*keys)
        if value > MAX_LAYERS:
            raise ValueError(f"{self._where}{keys[0]} must be between 1 and {MAX_LAYERS}, but is {value}")
        return value

    def positive(self, *keys: str, default: float | None = None) -> float:
        """Return the first given key's finite number over 0."""
        value = self.number(*keys, default=default)
        if value <= 0:
            raise ValueError(f"{self._where}{keys[0]} must be greater than 0, but is {value}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return the first given key's finite number."""
        value = self._get(keys, (float, int), "a number", default)
        if not abs(value) < MAX_NUMBER:
            raise ValueError(f"{self._where}{keys[0]} must be finite and under {MAX_NUMBER}, but is {value}")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return the key's finite number; None when it is null, `default` when it is absent."""
        return self.number(key) if self.has(key) else None if key in self._values else default

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return the key's list of finite numbers."""
        items = self._get((key,), (list, tuple), "a list of numbers", None)
        named = {f"{key}[{index}]": item for index, item in enumerate(items)}
        values = HfConfig(named, self._where)
        return tuple(values.number(name) for name in named)

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """Return the first given key's truth value."""
        return bool(self._get(keys, (bool,), "true or false", default))

    @staticmethod
    def divide(key: str, dim: int, num_heads: int) -> int:
        """Return the width of a head. Raises ValueError naming the key when the heads do not divide it."""
        if dim % num_heads:
            raise ValueError(f"{key} must be a multiple of the number of heads ({num_heads}), but is {dim}")
        return dim // num_heads

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return the first given key's string."""
        return str(self._get(keys, (str,), "a string", default))

    def sequence(self, key: str, default: Collection[object] | None = None) -> tuple[Any, ...]:
        """Return the key's list, its items unchecked."""
        return tuple(self._get((key,), (list, tuple), "a list", default))

    def choice(self, key: str, choices: Mapping[str, ChoiceT], default: str | None = None) -> ChoiceT:
        """Return what `choices` maps the key's string to; other strings are unsupported."""
        value = self.text(key, default=default)
        if value not in choices:
            raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported; known: {sorted(choices)}")
        return choices[value]

    def activation(self, key: str, default: str = "silu") -> Activation:
        """Return the activation that the key names."""
        return self.choice(key, _ACTIVATIONS, default=default)

    def layer_types(self, num_layers: int, default: Callable[[int], bool]) -> tuple[str, ...]:
        """Return `full_attention` or `sliding_attention` for each layer: `layer_types`, else what `default` says.

        `default` tells of a layer whether its attention slides.
        """
        given = self.sequence("layer_types", default=())
        if not given:
            return tuple(LAYER_TYPES[bool(default(layer))] for layer in range(num_layers))
        for kind in given:
            if kind not in LAYER_TYPES:
                raise UnsupportedSettingError(
                    f"{self._where}layer_types {kind!r} is not supported; known: {[*LAYER_TYPES]}"
                )
        if len(given) != num_layers:
            raise ValueError(f"{self._where}layer_types must name {num_layers} layers, but names {len(given)}")
        return given

    def windows(self, layer_types: Collection[str], key: str = "sliding_window") -> tuple[int | None, ...]:
        """Return each layer's window, or nothing when no layer slides."""
        if "sliding_attention" not in layer_types:
            self._read.add(key)
            return ()
        window = self.integer(key)
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def window_in_all(
        self, num_layers: int, *, default: int | None, key: str = "sliding_window"
    ) -> tuple[int | None, ...]:
        """Return the key's window for every layer, nothing when it is null; `default` stands in when it is absent."""
        if not self.has(key) and (key in self._values or default is None):
            self._read.add(key)
            return ()
        return (self.integer(key, default=default),) * num_layers

    def has(self, key: str) -> bool:
        """Tell whether the key is given and not null."""
        return self._values.get(key) is not None

    def mapping(self, key: str) -> Mapping[str, object]:
        """Return the key's object; an empty one when it is absent or null."""
        value = self._get((key,), (Mapping,), "an object", {})
        return dict(value)

    def require(self, key: str, allowed: Collection[object]) -> None:
        """Raise UnsupportedSettingError when the key is given, not null, and not one of the allowed values."""
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported; known: {list(allowed)}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedSettingError for a setting that changes the arithmetic and was not read. Call it last."""
        for key, neutral in NEUTRAL_SETTINGS.items():
            value = self._values.get(key)
            if key not in self._read and value is not None and value not in neutral:
                raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported by this model type")
        types = self._values.get("layer_types")
        if (
            types is not None
            and "layer_types" not in self._read
            and set(self.sequence("layer_types")) != {LAYER_TYPES[0]}
        ):
            raise UnsupportedSettingError(f"{self._where}layer_types {types!r} is not supported by this model type")

    def refuse_others(self, known: Collection[str]) -> None:
        """Raise UnsupportedSettingError for a key that is not known, unless its value is null or neutral."""
        for key, value in self._values.items():
            if key not in known and value is not None and value not in NEUTRAL_SETTINGS.get(key, ()):
                raise UnsupportedSettingError(f"{self._where}{key} {value!r} is not supported")

    def _get(self, keys: tuple[str, ...], types: tuple[type, ...], expected: str, default: object) -> Any:
        self._read.update(keys)
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
