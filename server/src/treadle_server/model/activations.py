"""The activations of feed-forwards by name, and their backward halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from treadle_plugin_api.backend import Array

from treadle_server.model import ops, ops_backward

ACTIVATIONS: Mapping[str, Callable[[Array, Array | None], Array]] = MappingProxyType(
    {
        "silu": ops.silu_forward,
        "gelu": ops.gelu_forward,
        "gelu_tanh": ops.gelu_tanh_forward,
        "gelu_quick": ops.gelu_quick_forward,
        "relu": ops.relu_forward,
        "relu_squared": ops.relu_squared_forward,
    }
)
ACTIVATIONS_BACKWARD: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "silu": ops_backward.silu_backward,
        "gelu": ops_backward.gelu_backward,
        "gelu_tanh": ops_backward.gelu_tanh_backward,
        "gelu_quick": ops_backward.gelu_quick_backward,
        "relu": ops_backward.relu_backward,
        "relu_squared": ops_backward.relu_squared_backward,
    }
)
