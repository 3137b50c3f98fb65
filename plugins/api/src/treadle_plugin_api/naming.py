"""Builds a family's tensor table from a list of names: what exists follows from the DecoderConfig.

    make_table(config, [
        Name("wte", "embedding"),
        Name("h.{layer}.gate_up", "layers.{layer}.mlp.gate", "layers.{layer}.mlp.up"),
        Name("lm_head", "head"),
    ])

A name stands for a weight and, where the config has one, a bias. `{layer}`, `{expert}` and `{head}` are counted up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import TensorEntry
from treadle_plugin_api.parameters import param_shapes

HEAD = "head.weight"


class Name:
    """A file's tensors and the canonical parameters they hold, as templates without `.weight` and `.bias`."""

    def __init__(
        self,
        theirs: str,
        *ours: str,
        transposed: bool = False,
        groups: int = 1,
        stacked: Literal["expert", "head"] | None = None,
        suffix: bool = True,
    ) -> None:
        """Describe one name.

        Args:
            theirs: the tensor's name in the file.
            ours: canonical parameters; their rows, one after the other, make up the tensor.
            transposed: the file stores matrices `[in, out]`.
            groups: see TensorEntry.
            stacked: the tensor has a leading axis over the experts, or over the heads.
            suffix: the file appends `.weight` and `.bias`; without, the tensor is a weight.
        """
        self.theirs = theirs
        self.ours = ours
        self.transposed = transposed
        self.groups = groups
        self.stacked = stacked
        self.suffix = suffix


def in_layers(prefix: str, names: Mapping[str, str | tuple[str, ...]]) -> list[Name]:
    """Return the names of a layer's tensors: file name after `prefix` -> canonical name after `layers.{layer}.`."""
    return [
        Name(prefix + theirs, *(f"layers.{{layer}}.{one}" for one in ((ours,) if isinstance(ours, str) else ours)))
        for theirs, ours in names.items()
    ]


def make_table(config: DecoderConfig, names: Iterable[Name]) -> tuple[TensorEntry, ...]:
    """Return an entry for every named tensor whose parameters the config has; the head is there even when tied."""
    known = {**param_shapes(config), HEAD: ()}.keys()
    entries: list[TensorEntry] = []
    for name in names:
        for place in _places(config, name):
            entries += _entries(config, name, place, known)
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class _Place:
    """The numbers that stand for a template's fields; experts and heads are counted within when they are stacked."""

    layer: int = 0
    expert: int = 0
    head: int = 0

    def fill(self, template: str) -> str:
        return template.format(layer=self.layer, expert=self.expert, head=self.head)


def _places(config: DecoderConfig, name: Name) -> Iterator[_Place]:
    """Count up the fields that both sides of a name have."""
    template = name.theirs + name.ours[0]
    for layer in range(config.num_layers if "{layer}" in template else 1):
        if "{expert}" in template and name.stacked is None:
            yield from (_Place(layer, expert=expert) for expert in range(config.moe.num_experts if config.moe else 0))
        elif "{head}" in template and name.stacked is None:
            yield from (_Place(layer, head=head) for head in range(config.attention.num_heads))
        else:
            yield _Place(layer)


def _entries(config: DecoderConfig, name: Name, place: _Place, known: Iterable[str]) -> Iterator[TensorEntry]:
    for part in ("weight", "bias") if name.suffix else ("weight",):
        params = tuple(f"{ours}.{part}" for ours in _counted(config, name, place))
        params = tuple(param for param in params if param in known)
        if params:
            theirs = place.fill(name.theirs)
            yield TensorEntry(
                file_name=f"{theirs}.{part}" if name.suffix else theirs,
                params=params,
                transposed=name.transposed and part == "weight",
                groups=name.groups,
                stacked=len(params) // len(name.ours) if name.stacked else 0,
            )


def _counted(config: DecoderConfig, name: Name, place: _Place) -> Iterator[str]:
    """Yield the canonical names of one tensor, those of all experts or heads when they are stacked in it."""
    if name.stacked is None:
        counted = [place]
    elif name.stacked == "expert":
        counted = [replace(place, expert=expert) for expert in range(config.moe.num_experts if config.moe else 0)]
    else:
        counted = [replace(place, head=head) for head in range(config.attention.num_heads)]
    for one in counted:
        yield from (one.fill(ours) for ours in name.ours)
