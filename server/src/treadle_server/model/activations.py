"""The activations of feed-forwards by name, with their derivatives, and what a feed-forward makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import MlpConfig

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
SLOPES: Mapping[str, Callable[[Array], tuple[Array, Array]]] = MappingProxyType(
    {
        "silu": ops_backward.silu_slope,
        "gelu": ops_backward.gelu_slope,
        "gelu_tanh": ops_backward.gelu_tanh_slope,
        "gelu_quick": ops_backward.gelu_quick_slope,
        "relu": ops_backward.relu_slope,
        "relu_squared": ops_backward.relu_squared_slope,
    }
)


def hidden_forward(mlp: MlpConfig, up: Array) -> Array:
    """Return `[rows, hidden]` of up, or of gate beside up `[rows, 2 * hidden]`; may write to up."""
    function = ACTIVATIONS[mlp.activation]
    width = up.shape[1] // 2 if mlp.gated else up.shape[1]
    hidden = np.empty((len(up), width), up.dtype) if mlp.gated else up
    for rows in ops.row_pieces(hidden):
        function(up[rows, :width], hidden[rows])
        if mlp.gated:
            hidden[rows] *= up[rows, width:]
    return hidden


def hidden_backward(mlp: MlpConfig, up: Array) -> tuple[Array, Array]:
    """Return what `hidden_forward` made of up, and in the place of up its derivatives.

    The gradient of up is dhidden times the derivatives; of gate beside up, dhidden times either half of them.
    """
    function = SLOPES[mlp.activation]
    if not mlp.gated:
        return function(up)
    width = up.shape[1] // 2
    hidden = np.empty((len(up), width), up.dtype)
    for rows in ops.row_pieces(hidden):
        activated, slope = function(up[rows, :width])
        np.multiply(activated, up[rows, width:], out=hidden[rows])
        np.multiply(slope, up[rows, width:], out=up[rows, :width])
        up[rows, width:] = activated
    return hidden, up
