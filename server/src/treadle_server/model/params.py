"""Canonical parameters: the immutable, versioned mapping that holds them; names and shapes come from the plugin API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from treadle_plugin_api.backend import Array, ArrayWeight, Weight
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.parameters import Shape, param_shapes

__all__ = ["Params", "Shape", "check_params", "param_shapes", "random_arrays"]


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
        is_norm = "norm." in name and name.endswith(".weight")
        arrays[name] = array + 1 if is_norm and not config.norm.unit_offset else array
    return arrays
