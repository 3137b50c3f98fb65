"""Gives every tensor of a GGUF file its Hugging Face name, its rows in order and its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from treadle_server.checkpoints.gguf_architectures import Architecture, Target
from treadle_server.checkpoints.gguf_file import GgufTensor
from treadle_server.checkpoints.gguf_rope import ROPE_TENSORS
from treadle_server.checkpoints.gguf_rows import Heads
from treadle_server.checkpoints.gguf_settings import Settings
from treadle_server.checkpoints.gguf_tensors import MappedTensor
from treadle_server.errors import CheckpointError


def map_tensors(settings: Settings, architecture: Architecture, heads: Heads) -> Iterator[MappedTensor]:
    """Yield every tensor of the file; raises UnsupportedModelError for one that the architecture does not have."""
    num_layers = settings.num_layers()
    for name, tensor in settings.file.tensors.items():
        if name in ROPE_TENSORS:
            continue  # said by rope_scaling
        place = _find_place(name, num_layers, architecture)
        if place is None:
            raise settings.unsupported(f"a {architecture.model_type} of {num_layers} layers has no tensor {name!r}")
        try:
            yield from _named(_layout(tensor, place, architecture, heads), place, heads)
        except ValueError as error:
            raise CheckpointError(f"{settings.file.path}: tensor {name!r} {error}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """What a tensor is: Hugging Face's prefix of its layer (empty outside), its module, `weight` or `bias`."""

    prefix: str
    module: str
    target: Target
    part: str


def _find_place(name: str, num_layers: int, architecture: Architecture) -> _Place | None:
    stem, _, part = name.rpartition(".")
    if part not in ("weight", "bias"):
        return None
    if stem in architecture.top:
        return _Place("", stem, architecture.top[stem], part)
    block, _, rest = stem.partition(".")
    layer, _, module = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or int(layer) >= num_layers:
        return None
    prefix = f"{architecture.layer_prefix}{layer}."
    if module in architecture.layer:
        return _Place(prefix, module, architecture.layer[module], part)
    return _one_expert(prefix, module, part, architecture)


def _one_expert(prefix: str, module: str, part: str, architecture: Architecture) -> _Place | None:
    """Files older than 2024 hold each expert by itself: `ffn_up.3`."""
    base, _, expert = module.partition(".")
    target = architecture.layer.get(f"{base}_exps")
    if not isinstance(target, str) or not expert.isdecimal():
        return None
    return _Place(prefix, base, target.format(int(expert)), part)


def _layout(tensor: GgufTensor, place: _Place, architecture: Architecture, heads: Heads) -> MappedTensor:
    """Return the tensor in Hugging Face's layout, not named yet."""
    shape = tensor.shape
    if place.module in architecture.unsqueezed and len(shape) == 1:
        shape = (1, *shape)
    transposed = place.module in architecture.transposed and place.part == "weight"
    order = architecture.rows.get(place.module)
    if order is not None:
        _check_rows(tensor, place.module, heads)
    return MappedTensor(
        name="",
        tensor=tensor,
        shape=shape[::-1] if transposed else shape,
        rows=None if order is None else order(heads),
        offset=architecture.norm_offset if place.module.endswith("norm") else 0.0,
        transposed=transposed,
    )


def _check_rows(tensor: GgufTensor, module: str, heads: Heads) -> None:
    """Raise ValueError unless a query, key or fused matrix has the rows that its heads need."""
    queries, keys, values = heads.parts
    needed = {"attn_q": queries, "attn_k": keys}.get(module, queries + keys + values)
    if len(tensor.rows) != needed:
        raise ValueError(
            f"has {len(tensor.rows)} rows, {heads.num_query} query heads and {heads.num_kv} key-value heads "
            f"of {heads.dim} need {needed}"
        )


def _named(layout: MappedTensor, place: _Place, heads: Heads) -> Iterator[MappedTensor]:
    tensor, target = layout.tensor, place.target
    if isinstance(target, tuple):
        _check_rows(tensor, place.module, heads)
        for name, some in zip(target, np.split(np.arange(len(tensor.rows)), np.cumsum(heads.parts)[:-1]), strict=True):
            shape = (len(some), *tensor.shape[1:])
            yield replace(layout, name=f"{place.prefix}{name}.{place.part}", shape=shape, rows=some)
    elif "{}" in target:
        for item, some in enumerate(np.split(np.arange(len(tensor.rows)), tensor.shape[0])):
            name = f"{place.prefix}{target.format(item)}.{place.part}"
            yield replace(layout, name=name, shape=tensor.shape[1:], rows=some)
    else:
        yield replace(layout, name=f"{place.prefix}{target}.{place.part}")
