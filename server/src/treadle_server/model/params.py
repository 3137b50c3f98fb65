"""Canonical parameters: their names and shapes for a config, and the immutable, versioned mapping that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from treadle_plugin_api.backend import Array, ArrayWeight, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

Shape = tuple[int, ...]


class Params(Mapping[str, Weight]):
    """An immutable mapping from canonical name to weight; `version` counts what has been published for a model."""

    def __init__(self, weights: Mapping[str, Weight], version: int = 0) -> None:
        self._weights = dict(weights)
        self.version = version

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], version: int = 0) -> Params:
        """Hold arrays that are already canonical. They must not be written to afterwards."""
        return cls({name: ArrayWeight(array) for name, array in arrays.items()}, version)

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in their stored formats."""
        return sum(weight.num_bytes for weight in self._weights.values())


def param_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shape of every canonical parameter of a config, in the order of the forward pass."""
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab_size, config.dim)}
    if config.positions.kind == "learned":
        shapes["positions.weight"] = (config.context_length, config.dim)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    if config.has_final_norm:
        shapes |= _norm_shapes("final_norm", config)
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    if config.head_bias:
        shapes["head.bias"] = (config.vocab_size,)
    return shapes


def check_params(config: DecoderConfig, params: Mapping[str, Weight]) -> None:
    """Raise ValueError unless the names and shapes are exactly those of the config."""
    expected = param_shapes(config)
    for name in expected.keys() ^ params.keys():
        raise ValueError(f"parameter {name} is {'missing' if name in expected else 'not part of the model'}")
    for name, shape in expected.items():
        if params[name].shape != shape:
            raise ValueError(f"parameter {name} must have shape {list(shape)}, but has {list(params[name].shape)}")


def random_arrays(config: DecoderConfig, seed: int, scale: float = 0.05) -> dict[str, Array]:
    """Draw every parameter from a normal distribution, float32; norm weights around 1. For tests and timing."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, shape in param_shapes(config).items():
        array = rng.standard_normal(shape, np.float32)
        array *= scale
        arrays[name] = array + 1 if name.endswith("norm.weight") else array
    return arrays


def _layer_shapes(config: DecoderConfig) -> dict[str, Shape]:
    attention, mlp, dim = config.attention, config.mlp, config.dim
    query_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    shapes = _norm_shapes("attention_norm", config)
    for name, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes |= _linear_shapes(f"attention.{name}", rows, dim, bias=attention.qkv_bias)
    shapes |= _linear_shapes("attention.o", dim, query_rows, bias=attention.out_bias)
    shapes |= _norm_shapes("mlp_norm", config)
    for name in ("gate", "up") if mlp.gated else ("up",):
        shapes |= _linear_shapes(f"mlp.{name}", mlp.hidden_dim, dim, bias=mlp.bias)
    return shapes | _linear_shapes("mlp.down", dim, mlp.hidden_dim, bias=mlp.bias)


def _norm_shapes(name: str, config: DecoderConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.dim,)}
    return shapes | ({f"{name}.bias": (config.dim,)} if config.norm.bias else {})


def _linear_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if bias else {})
