"""The canonical parameters in the arrays of a prepared decoder, several of which can lie in one.

A gradient has the layout of the array that was multiplied with; so gradients and parameters are cut the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle_plugin_api.backend import Array
from treadle_plugin_api.parameters import param_shapes

from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder


def parameter_views(prepared: PreparedDecoder) -> dict[str, Array]:
    """Return every canonical parameter as a view, in the order of the forward pass; a tied head is not named twice."""
    views = {"embedding.weight": prepared.embedding}
    if prepared.positions is not None:
        views["positions.weight"] = prepared.positions
    for part in _learned(prepared):
        views |= cut(part.parts, part.weight, part.bias)
    return {name: views[name] for name in param_shapes(prepared.config)}


def cut(parts: Mapping[str, slice | int], weight: Array | None, bias: Array | None) -> Iterator[tuple[str, Array]]:
    """Yield name and rows of each part of a matrix or norm, and of its bias."""
    for name, rows in parts.items():
        if weight is not None:
            yield f"{name}.weight", weight[rows]
        if bias is not None:
            yield f"{name}.bias", bias[rows]


def _learned(prepared: PreparedDecoder) -> Iterator[Linear | Norm]:
    ends = (prepared.embedding_in, prepared.embedding_norm, prepared.final_norm, prepared.embedding_out, prepared.head)
    yield from (part for part in ends if part is not None)
    for layer in prepared.layers:
        yield from (part for part in _of_layer(layer) if part is not None)


def _of_layer(layer: Layer) -> Iterator[Linear | Norm | None]:
    yield from (layer.attention_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.out, layer.attention_output_norm)
    yield from (layer.mlp_norm, *_of_mlp(layer.mlp), layer.mlp_output_norm)


def _of_mlp(mlp: Mlp | Experts) -> Iterator[Linear | None]:
    if isinstance(mlp, Mlp):
        yield from (mlp.up, mlp.down)
        return
    yield mlp.router
    for expert in (*mlp.each, *([] if mlp.shared is None else [mlp.shared])):
        yield from (expert.up, expert.down)
    yield mlp.shared_gate
