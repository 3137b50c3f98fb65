"""The arrays of a prepared decoder by name, and the canonical parameters that lie in each, row after row.

A gradient has the layout of the array that was multiplied with; so gradients and parameters are cut the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.parameters import param_shapes

from treadle_server.model.prepared import Experts, Layer, Linear, Mlp, Norm, PreparedDecoder


def fused_arrays(prepared: PreparedDecoder) -> dict[str, Array]:
    """Return every learned array, not copied; a tied head is not named twice."""
    config = prepared.config
    named: list[tuple[str, Linear | Norm | Mlp | Experts | None]] = [
        ("embedding", Linear(prepared.embedding, None)),
        ("embedding_in", prepared.embedding_in),
        ("embedding_norm", prepared.embedding_norm),
        ("positions", None if prepared.positions is None else Linear(prepared.positions, None)),
    ]
    for index, layer in enumerate(prepared.layers):
        named += [(f"layers.{index}.{name}", part) for name, part in _parts(layer)]
    head = Norm(None if config.tied_head else prepared.head.weight, prepared.head.bias)
    named += [("final_norm", prepared.final_norm), ("embedding_out", prepared.embedding_out), ("head", head)]
    return {name: array for prefix, part in named for name, array in _arrays(prefix, part)}


def _parts(layer: Layer) -> list[tuple[str, Linear | Norm | Mlp | Experts | None]]:
    return [
        ("attention_norm", layer.attention_norm),
        ("attention.qkv", layer.qkv),
        ("attention.q_norm", layer.q_norm),
        ("attention.k_norm", layer.k_norm),
        ("attention.o", layer.out),
        ("attention_output_norm", layer.attention_output_norm),
        ("mlp_norm", layer.mlp_norm),
        ("mlp", layer.mlp),
        ("mlp_output_norm", layer.mlp_output_norm),
    ]


def _arrays(prefix: str, part: Linear | Norm | Mlp | Experts | None) -> Iterator[tuple[str, Array]]:
    if isinstance(part, Mlp):
        yield from _arrays(f"{prefix}.up", part.up)
        yield from _arrays(f"{prefix}.down", part.down)
    elif isinstance(part, Experts):
        yield from _arrays(f"{prefix}.router", part.router)
        for expert, mlp in enumerate(part.each):
            yield from _arrays(f"{prefix}.experts.{expert}", mlp)
        yield from _arrays(f"{prefix}.shared", part.shared)
        yield from _arrays(f"{prefix}.shared_gate", part.shared_gate)
    elif part is not None:
        if part.weight is not None:
            yield f"{prefix}.weight", part.weight
        if part.bias is not None:
            yield f"{prefix}.bias", part.bias


def split_fused(config: DecoderConfig, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return views under the canonical names, in their order, of arrays with the names and shapes of `fused_arrays`."""
    shapes = param_shapes(config)
    views: dict[str, Array] = {}
    for name, array in arrays.items():
        start, rows = 0, array.reshape(-1) if _HEAD_NORM.search(name) else array
        for part in _canonical_names(config, name):
            stop = start + shapes[part][0]
            views[part] = rows[start:stop]
            start = stop
    return {name: views[name] for name in shapes}


_HEAD_NORM = re.compile(r"\.([qk])_norm\.")


def _canonical_names(config: DecoderConfig, name: str) -> list[str]:
    """Return the canonical parameters that lie in one fused array."""
    stem, part = name.rsplit(".", 1)
    if stem.endswith(".qkv"):
        return [f"{stem.removesuffix('qkv')}{one}.{part}" for one in "qkv"]
    if stem.endswith(".up") and config.mlp.gated:
        return [f"{stem.removesuffix('up')}{one}.{part}" for one in ("gate", "up")]
    match = _HEAD_NORM.search(name)
    if match and config.attention.qk_norm == "each_head":
        num_heads = config.attention.num_heads if match[1] == "q" else config.attention.num_kv_heads
        return [f"{stem}.{head}.{part}" for head in range(num_heads)]
    return [name]
