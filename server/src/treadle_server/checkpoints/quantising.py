"""Quantising a model: which of its parameters are rounded, and how far."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from treadle_plugin_api.backend import QUANTISED_BITS, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.checkpoints.rounding import round_weight
from treadle_server.checkpoints.saving import new_folder, save_checkpoint
from treadle_server.errors import CheckpointError, UnsupportedModelError
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params

# Called with a description, the bytes done and those in all.
Progress = Callable[[str, int, int], None]

# Every product of a layer but those that choose experts, which are small and decide much.
_PRODUCTS = re.compile(r"layers\.\d+\.(?:attention\.[qkvo]|mlp\.(?:experts\.\d+\.|shared\.)?(?:gate|up|down))\.weight")


def quantise(
    folder: Path, config: DecoderConfig, params: Mapping[str, Weight], dtype: str, progress: Progress | None = None
) -> Params:
    """Return parameters whose large matrices are rounded to `int8` or `int4`; the others are as they were.

    The head is rounded to int8 in both cases: each of its rows decides about one token. So is the embedding where it is
    the head; one that is only looked up in stays as it is.

    folder is what errors name.

    Raises:
        UnsupportedModelError: the model is quantised already.
        CheckpointError: a parameter has numbers that are not finite.
    """
    if dtype not in QUANTISED_BITS:
        raise ValueError(f"quantise must be one of {', '.join(QUANTISED_BITS)}, but is {dtype!r:.80}")
    _refuse_twice(folder, params)
    head = "embedding.weight" if config.tied_head else "head.weight"
    rounded: dict[str, Weight] = {}
    total_bytes, done_bytes = sum(weight.num_bytes for weight in params.values()), 0
    for name, weight in params.items():
        rounded[name] = weight
        if name == head or _PRODUCTS.fullmatch(name):
            rounded[name] = _round(folder, name, weight, "int8" if name == head else dtype)
        done_bytes += weight.num_bytes
        if progress is not None:
            progress(f"rounding to {dtype}", done_bytes, total_bytes)
    return Params(rounded)


def save_quantised(
    source: Path, folder: Path, dtype: str, families: FamilyRegistry | None = None, progress: Progress | None = None
) -> int:
    """Write a model folder's quantised twin to a new folder, all of it or nothing; return the bytes of its parameters.

    Raises CheckpointError for a source that is broken or quantised, and for a folder that holds something already.
    """
    with load_checkpoint(source, families) as checkpoint, new_folder(folder) as written:
        params = quantise(source, checkpoint.config, checkpoint.params, dtype, progress)
        save_checkpoint(written, checkpoint, params)
    return params.num_bytes


def _refuse_twice(folder: Path, params: Mapping[str, Weight]) -> None:
    if any(weight.dtype in QUANTISED_BITS for weight in params.values()):
        raise UnsupportedModelError(
            f"{folder}: the weights are quantised, and cannot be quantised once more; start from what they were made of"
        )


def _round(folder: Path, name: str, weight: Weight, dtype: str) -> Weight:
    try:
        return round_weight(weight, dtype)
    except ValueError as error:
        raise CheckpointError(f"{folder}: parameter {name!r} cannot be quantised: {error}") from error
