"""For authors of model families: `check_family`, which finds most mistakes; and of gradients: `check_grads`.

    def test_my_family():
        check_family(MY_FAMILY, {"model_type": "mine", "vocab_size": 50, "hidden_size": 16, ...})

    def test_tanh_backward():
        check_grads(np.tanh, lambda dy, x: [dy / np.cosh(x) ** 2], np.linspace(-1, 1, 5))

Give `check_family` a small config.json: a few layers, every feature on, each kind of layer once.
`check_decoder_grads` compares a whole decoder's backward pass with its forward pass.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array, Batch, Weight
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family

from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.checkpoints.saving import save_checkpoint, to_file_tensor
from treadle_server.checkpoints.tensor_table import read_tables
from treadle_server.errors import CheckpointError
from treadle_server.model.decoder import Decoder
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params, random_arrays
from treadle_server.model.trainable import TrainableDecoder

# float32 rounding in models of a few layers whose numbers are near 1.
_ATOL = 1e-4
# Central differences of fourth order in float64. The second step is for a function with a kink (relu, clipping) within
# reach of the first; a gradient that is right agrees at one of them, a wrong one at neither.
_STEPS = (1e-5, 1e-7)
_STENCIL = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))
_GRAD_RTOL = 1e-6


def check_family(family: Family, hf_config: Mapping[str, object]) -> None:
    """Raise AssertionError, saying what is wrong, unless the family keeps the contract for this config.json.

    Checked with random parameters: for each of its tensor tables every canonical parameter has one place, and a folder
    that is written, loaded and saved gives every number back under the same names; decoding through a cache equals one
    pass whatever the chunks and the rest of the batch, bit for bit in reproducible mode; an observer changes nothing.
    What no test without a reference can tell is whether the arithmetic is the model's: compare its logits too.
    """
    try:
        _check_family(family, hf_config)
    except AssertionError:
        raise
    except Exception as error:  # what an author's code raises, and how loading refuses its tables
        raise AssertionError(f"the family fails: {type(error).__name__}: {error}") from error


def _check_family(family: Family, hf_config: Mapping[str, object]) -> None:
    _check(hf_config.get("model_type") == family.model_type, f"hf_config must have model_type {family.model_type!r}")
    config = family.config_from_hf(hf_config)
    _check(isinstance(config, DecoderConfig), f"config_from_hf returned {config!r:.80}, not a DecoderConfig")
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
    try:
        (table,) = read_tables(family, config)
    except CheckpointError as error:
        raise AssertionError(f"{what}: {error}") from error
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


def check_grads(
    forward: Callable[..., Array], backward: Callable[..., Sequence[Array | None]], *arrays: Array, seed: int = 0
) -> None:
    """Raise AssertionError unless backward(dy, *arrays) has the gradients of forward(*arrays) by every array.

    Each float64 array is moved both ways along random directions, and the change of sum(forward * dy), dy random,
    compared with what its gradient promises. A gradient of None says that the array has none to check.
    """
    rng = np.random.default_rng(seed)
    dy = rng.standard_normal(forward(*arrays).shape)
    grads = backward(dy, *(array.copy() for array in arrays))
    _check(len(grads) == len(arrays), f"backward returns {len(grads)} gradients of {len(arrays)} arrays")
    for number, (array, grad) in enumerate(zip(arrays, grads, strict=True)):
        if grad is None:
            continue
        _check(grad.shape == array.shape, f"gradient {number} has shape {grad.shape}, its array {array.shape}")
        for _ in range(3):
            direction = rng.standard_normal(array.shape)
            moved = array.copy()
            moving = [*arrays[:number], moved, *arrays[number + 1 :]]

            def value(moving: list[Array] = moving) -> float:
                return float((forward(*moving) * dy).sum())

            _check_slope(float((grad * direction).sum()), value, [moved], [direction], f"argument {number}")


def check_decoder_grads(config: DecoderConfig, params: Mapping[str, Weight], seed: int = 0) -> None:
    """Raise AssertionError unless a decoder's gradients in float64 are those of its forward pass.

    Every kind of parameter is moved along a random direction of its own, in all layers at once, under a ragged batch
    of random ids. Give it a small model.
    """
    rng = np.random.default_rng(seed)
    batch = Batch.of([rng.integers(0, config.vocab_size, length) for length in (3, min(12, config.context_length))])
    dlogits = rng.standard_normal((batch.num_tokens, config.vocab_size))
    decoder = TrainableDecoder(config, params, dtype="float64")
    grads = _decoder_grads(decoder, batch, dlogits)

    def loss() -> float:
        decoder.refresh()
        return float((decoder.head(decoder.forward(batch)) * dlogits).sum())

    for kind in dict.fromkeys(re.sub(r"\d+", "N", name) for name in grads):
        names = [name for name in grads if re.sub(r"\d+", "N", name) == kind]
        directions = [rng.standard_normal(grads[name].shape) for name in names]
        analytic = sum(float((grads[name] * one).sum()) for name, one in zip(names, directions, strict=True))
        _check_slope(analytic, loss, [decoder.parameters[name] for name in names], directions, kind)


def _decoder_grads(decoder: TrainableDecoder, batch: Batch, dlogits: Array) -> dict[str, Array]:
    saved: dict[str, Array] = {}
    hidden = decoder.forward_saving(batch, saved)
    of_head = {name: np.zeros_like(decoder.parameters[name]) for name in decoder.head_parameters()}
    grads = decoder.backward(saved, decoder.head_backward(hidden, dlogits.copy(), of_head))
    for name, grad in of_head.items():
        grads[name] = grads[name] + grad if name in grads else grad
    return grads


def _check_slope(
    analytic: float, value: Callable[[], float], arrays: Sequence[Array], directions: Sequence[Array], what: str
) -> None:
    """Compare a slope with that of `value` as it reads arrays that are moved along directions."""
    noise = 1e-8 * max(1.0, abs(value()))
    numeric = [_slope(value, arrays, directions, step) for step in _STEPS[:1]]
    if abs(analytic - numeric[0]) > _GRAD_RTOL * abs(numeric[0]) + noise:
        numeric.append(_slope(value, arrays, directions, _STEPS[1]))
    agrees = any(abs(analytic - one) <= _GRAD_RTOL * abs(one) + noise for one in numeric)
    _check(agrees, f"{what}: by its gradient the value changes by {analytic:.9g}, by moving it by {numeric[-1]:.9g}")


def _slope(value: Callable[[], float], arrays: Sequence[Array], directions: Sequence[Array], step: float) -> float:
    """Return the change of a value as the arrays that it reads move along their directions; they are put back."""
    before = [array.copy() for array in arrays]
    slope = 0.0
    for steps, weight in _STENCIL:
        for array, start, direction in zip(arrays, before, directions, strict=True):
            array[...] = start + steps * step * direction
        slope += weight / step * value()
    for array, start in zip(arrays, before, strict=True):
        array[...] = start
    return slope
