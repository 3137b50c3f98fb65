"""For authors of model families: `check_family`, which finds most mistakes.

    def test_my_family():
        check_family(MY_FAMILY, {"model_type": "mine", "vocab_size": 50, "hidden_size": 16, ...})

Give it a small config.json: a few layers, every feature on, each kind of layer once.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Batch, Weight
from treadle_plugin_api.family import Family
from treadle_plugin_api.parameters import param_shapes

from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.checkpoints.saving import save_checkpoint, to_file_tensor
from treadle_server.model.decoder import Decoder
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params, random_arrays

_HEAD = "head.weight"
# float32 rounding in models of a few layers whose numbers are near 1.
_ATOL = 1e-4


def check_family(family: Family, hf_config: Mapping[str, object]) -> None:
    """Raise AssertionError, saying what is wrong, unless the family keeps the contract for this config.json.

    Checked with random parameters: for each of its tensor tables every canonical parameter has one place, and a folder
    that is written, loaded and saved gives every number back under the same names; decoding through a cache equals one
    pass whatever the chunks and the rest of the batch, bit for bit in reproducible mode; an observer changes nothing.
    What no test without a reference can tell is whether the arithmetic is the model's: compare its logits too.
    """
    _check(hf_config.get("model_type") == family.model_type, f"hf_config must have model_type {family.model_type!r}")
    config = family.config_from_hf(hf_config)
    arrays = random_arrays(config, seed=0, scale=0.2)
    for number, table in enumerate((family.tensor_table, *family.other_tables)):
        alone = dataclasses.replace(family, tensor_table=table, other_tables=())
        with tempfile.TemporaryDirectory() as folder:
            _check_files(alone, hf_config, arrays, Path(folder), f"tensor table {number}")
    _check_decoding(Decoder(config, Params.from_arrays(arrays)), exact=False)
    _check_decoding(Decoder(config, Params.from_arrays(arrays), numerics="reproducible"), exact=True)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(message)


def _check_files(
    family: Family, hf_config: Mapping[str, object], arrays: Mapping[str, Array], folder: Path, what: str
) -> None:
    """Write a folder by the table, load it, save it again: the numbers and the names stay."""
    config = family.config_from_hf(hf_config)
    table = family.tensor_table(config)
    named = [param for entry in table for param in entry.params]
    for name in sorted({*param_shapes(config), _HEAD} ^ {*named}):
        raise AssertionError(f"{what}: parameter {name!r} is {'unknown' if name in named else 'missing'}")
    _check(len(named) == len({*named}), f"{what}: a parameter is named twice")
    weights: Mapping[str, Weight] = Params.from_arrays(arrays)
    tensors = {entry.file_name: to_file_tensor(entry, weights) for entry in table if entry.params[0] in weights}
    (folder / "config.json").write_text(json.dumps(dict(hf_config)), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors)
    with _load(family, folder) as checkpoint:
        for name, array in arrays.items():
            _check(np.array_equal(_read(checkpoint.params[name]), array), f"{what}: {name} loads as other numbers")
        save_checkpoint(folder / "saved", checkpoint)
    with _load(family, folder / "saved") as checkpoint:
        _check({entry.file_name for entry in checkpoint.table} == tensors.keys(), f"{what}: saving changes the names")
        for name, array in arrays.items():
            _check(np.array_equal(_read(checkpoint.params[name]), array), f"{what}: {name} is saved as other numbers")


def _load(family: Family, folder: Path) -> Checkpoint:
    """Open a folder by this family alone."""
    return load_checkpoint(folder, FamilyRegistry([family], built_in=()))


def _read(weight: Weight) -> Array:
    out = np.empty(weight.shape, np.float32)
    weight.read_into(out)
    return out


def _check_decoding(decoder: Decoder, *, exact: bool) -> None:
    """One pass, chunks through a cache, and a batch of two give the same, to the bit where `exact`."""
    rng = np.random.default_rng(1)
    length = min(40, decoder.config.context_length)
    ids, mate = rng.integers(0, decoder.config.vocab_size, (2, length))
    whole = _logits(decoder, Batch.of([ids]))
    _check(bool(np.isfinite(whole).all()), "logits are not finite")
    _compare(_in_chunks(decoder, ids, length // 3), whole, exact=exact, what="a prompt in chunks")
    _compare(_in_chunks(decoder, ids, 1), whole, exact=exact, what="a prompt token by token")
    _compare(_logits(decoder, Batch.of([mate, ids]))[length:], whole, exact=exact, what="a sequence beside another")
    if not exact:
        seen: dict[str, Array] = {}
        hidden = decoder.forward(Batch.of([ids]), observe=seen.__setitem__)
        _compare(decoder.head(hidden, seen.__setitem__), whole, exact=False, what="an observed pass")
        _check("logits" in seen, "an observed pass shows no logits")


def _logits(decoder: Decoder, batch: Batch) -> Array:
    return decoder.head(decoder.forward(batch))


def _in_chunks(decoder: Decoder, ids: NDArray[np.int64], size: int) -> Array:
    """Return `[tokens, vocab]` of ids fed through one cache, so many at a time."""
    cache, rows = decoder.new_cache(), []
    for start in range(0, len(ids), max(1, size)):
        batch = Batch.of([ids[start : start + max(1, size)]], [start], [len(ids)])
        rows.append(decoder.head(decoder.forward(batch, [cache])))
    return np.concatenate(rows)


def _compare(found: Array, expected: Array, *, exact: bool, what: str) -> None:
    error = float(np.abs(found - expected).max())
    same = np.array_equal(found, expected) if exact else error <= _ATOL * max(1.0, float(np.abs(expected).max()))
    mode = "reproducible" if exact else "fast"
    _check(same, f"{what} gives other logits than one pass in {mode} mode: they differ by up to {error:.2g}")
