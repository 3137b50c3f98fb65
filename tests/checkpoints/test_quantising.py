"""Rounding a model's matrices, and folders of quantised models: written, read back, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api.backend import ArrayWeight, Batch, QuantisedWeight
from treadle_server import Trainer
from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.quantising import quantise, save_quantised
from treadle_server.checkpoints.rounding import round_weight
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.errors import CheckpointError, UnsupportedModelError
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params

FORMATS = ["int8", "int4"]
LIMITS = {"int8": (-127, 127), "int4": (-8, 7)}
MODELS = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "golden" / "parity").glob("*.npz")))
SHAPES = {"rows": st.integers(1, 9), "width": st.integers(1, 100)}


def draw(rows: int, width: int, power: int = 0) -> np.ndarray:
    """Draw a matrix of numbers of about 2^power."""
    return (np.random.default_rng(width).standard_normal((rows, width)) * 2.0**power).astype(np.float32)


def widened(weight: QuantisedWeight) -> np.ndarray:
    """Return a quantised matrix as float32."""
    out = np.empty(weight.shape, np.float32)
    weight.read_into(out)
    return out


def same(a: QuantisedWeight, b: QuantisedWeight) -> bool:
    """Whether two quantised matrices are bit for bit the same."""
    parts = (a.shape, a.numbers.tobytes(), a.scales.tobytes())
    return parts == (b.shape, b.numbers.tobytes(), b.scales.tobytes())


@settings(max_examples=40, deadline=None)
@given(power=st.integers(-30, 30), **SHAPES)
def test_eight_bits_are_off_by_half_a_step_at_most(rows, width, power):
    """Each group of 32 has the scale of its largest number, which bfloat16 rounds; a group of zeros stays zero."""
    matrix = draw(rows, width, power)
    matrix[0] = 0
    weight = round_weight(ArrayWeight(matrix), "int8")
    steps = np.repeat(weight.scales.astype(np.float32), 32, axis=1)[:, :width]
    assert (np.abs(widened(weight) - matrix) <= 0.5001 * steps).all()
    assert (np.abs(weight.integers()) <= 127).all()
    assert (widened(weight)[0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(power=st.integers(-30, 30), **SHAPES)
def test_four_bits_are_nearer_than_by_the_largest_number(rows, width, power):
    """In no group is the squared error above that of the scale that the largest number suggests, eight steps of it."""
    matrix = draw(rows, width, power)
    weight = round_weight(ArrayWeight(matrix), "int4")
    groups = -(-width // 32)
    padded = np.zeros((2, rows, groups * 32), np.float32)
    padded[0, :, :width], padded[1, :, :width] = matrix, widened(weight)
    parts, found = padded.reshape(2, rows, groups, 32)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2, keepdims=True), axis=2)
    scale = (largest / -8).astype(ml_dtypes.bfloat16).astype(np.float32)
    plain = np.clip(np.rint(np.divide(parts, scale, out=np.zeros_like(parts), where=scale != 0)), -8, 7) * scale
    errors = (((one - parts) ** 2).sum(axis=2, dtype=np.float64) for one in (found, plain))
    assert (next(errors) <= next(errors) * 1.0001 + 1e-30).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 9), st.integers(1, 100), st.sampled_from(["float32", "float64"]))
def test_widening_is_numbers_times_scales(dtype, rows, width, wide):
    """Whatever is read into holds each number times the scale of its group, exactly."""
    weight = round_weight(ArrayWeight(draw(rows, width)), dtype)
    out = np.empty((rows, width + 3), wide)[:, :width]
    weight.read_into(out)
    scales = np.repeat(weight.scales.astype(np.float64), 32, axis=1)[:, :width]
    np.testing.assert_array_equal(out, weight.integers() * scales)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_the_one_rounded_at_load(golden, tmp_path, name, dtype):
    """Of every family, fused, stacked or transposed as its files may be, each parameter comes back bit for bit."""
    source, folder = golden / "models" / name, tmp_path / "quantised"
    save_quantised(source, folder, dtype)
    with load_checkpoint(source) as plain, load_checkpoint(folder) as saved:
        rounded = quantise(source, plain.config, plain.params, dtype)
        assert saved.config == plain.config
        for param, weight in rounded.items():
            if isinstance(weight, QuantisedWeight):
                assert same(weight, saved.params[param]), param
            else:
                assert weight.view().tobytes() == saved.params[param].view().tobytes(), param
        assert dtype in {weight.dtype for weight in saved.params.values()}
        save_quantised_again(folder, saved, tmp_path / "again")


def save_quantised_again(folder: Path, saved: Checkpoint, again: Path) -> None:
    """A quantised checkpoint that is saved as it is has the same files."""
    from treadle_server.checkpoints.saving import save_checkpoint

    save_checkpoint(again, saved)
    for path in (path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")):
        if path.name in ("config.json", "model.safetensors"):
            assert (again / path.name).read_bytes() == path.read_bytes()


def test_numpy_widens(golden, tmp_path):
    """NumPy's backend computes with the values that a quantised folder has."""
    save_quantised(golden / "models" / "llama_plain", tmp_path / "q", "int4")
    batch = Batch.of([np.arange(20)])
    with load_checkpoint(tmp_path / "q") as saved:
        arrays = {
            name: widened(one) if isinstance(one, QuantisedWeight) else one.view() for name, one in saved.params.items()
        }
        decoders = [Decoder(saved.config, params) for params in (saved.params, Params.from_arrays(arrays))]
    assert len({one.head(one.forward(batch)).tobytes() for one in decoders}) == 1


def test_what_is_rounded(golden):
    """Products of layers have the bits that were asked for, head and tied embedding eight; the rest stays."""
    with load_checkpoint(golden / "models" / "mixtral") as checkpoint:
        config, params = checkpoint.config, checkpoint.params
        found = {name: one.dtype for name, one in quantise(checkpoint.folder, config, params, "int4").items()}
        assert found["layers.0.attention.q.weight"] == found["layers.0.mlp.experts.1.down.weight"] == "int4"
        assert found["embedding.weight" if config.tied_head else "head.weight"] == "int8"
        assert found["layers.0.mlp.router.weight"] == params["layers.0.mlp.router.weight"].dtype
        assert config.tied_head or found["embedding.weight"] == params["embedding.weight"].dtype


def test_the_files_are_small(tmp_path):
    """Eight bits take nine bits a number with their scales, four take five and a half at most."""
    import treadle_weights

    source = treadle_weights.folder("stories")
    sizes = [save_quantised(source, tmp_path / dtype, dtype) for dtype in FORMATS]
    num_bytes = (source / "model.safetensors").stat().st_size
    assert sizes[0] < num_bytes * 8.6 / 16
    assert sizes[1] < num_bytes * 5.5 / 16


@pytest.fixture
def quantised(golden, tmp_path) -> Path:
    """A quantised folder."""
    save_quantised(golden / "models" / "llama_plain", tmp_path / "quantised", "int4")
    return tmp_path / "quantised"


def test_training_is_refused(quantised):
    """A trainer does not take quantised weights, and says what it takes."""
    with pytest.raises(UnsupportedModelError, match=r"the weights are quantised \(treadle\); use the model's float16"):
        Trainer.load(quantised)


def test_nothing_is_rounded_twice(quantised, tmp_path):
    """A quantised folder is not quantised again, and no new folder is left behind."""
    with pytest.raises(UnsupportedModelError, match="are quantised, and cannot be quantised once more"):
        save_quantised(quantised, tmp_path / "new", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["quantised"]


def test_a_folder_that_holds_something_is_kept(quantised, golden):
    """A new folder is needed; an empty one will do."""
    with pytest.raises(CheckpointError, match="quantised: holds something already; name a new folder"):
        save_quantised(golden / "models" / "llama_plain", quantised, "int8")
    (quantised.parent / "empty").mkdir()
    save_quantised(golden / "models" / "llama_plain", quantised.parent / "empty", "int8")


def test_numbers_that_are_not_finite_are_told(golden):
    """The parameter is named."""
    with load_checkpoint(golden / "models" / "llama_plain") as checkpoint:
        broken = np.full(checkpoint.params["layers.0.mlp.down.weight"].shape, np.nan, np.float32)
        params = {**checkpoint.params, "layers.0.mlp.down.weight": ArrayWeight(broken)}
        for dtype in FORMATS:
            with pytest.raises(CheckpointError, match=r"'layers.0.mlp.down.weight' cannot be quantised: .* not finite"):
                quantise(checkpoint.folder, checkpoint.config, params, dtype)


def change_config(folder: Path, **fields: object) -> None:
    """Change what config.json says of the quantisation."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "quantization_config.bits must be 8 or 4, but is 3"),
        ({"group_size": 128}, "quantization_config.group_size must be 32, but is 128"),
        ({"quant_method": "gptq"}, r"the weights are quantised \(gptq\)"),
    ],
)
def test_other_sizes_and_methods_are_refused(quantised, fields, message):
    """Sizes that treadle has not, and what others quantised, are refused by name."""
    change_config(quantised, **fields)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(quantised)


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{NAME}_scale"), f"tensor '{NAME}_scale', the scales of a quantised one"),
        (lambda tensors: tensors.update({NAME: tensors[NAME][:, :-1]}), "must be U8 .* but is U8"),
        (lambda tensors: tensors.update({f"{NAME}_scale": tensors[NAME]}), "must be BF16 .* but is U8"),
        (lambda tensors: tensors.update({"extra_scale": tensors[NAME]}), "is not part of the model"),
    ],
)
def test_broken_tensors_are_told(quantised, change: Callable, message):
    """Scales that are missing, shapes and formats that do not fit, and what belongs to nothing."""
    path = quantised / "model.safetensors"
    file = SafetensorsFile(path)
    types = {"U8": np.uint8, "I8": np.int8, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    tensors = {
        name: np.array(file.map_bytes(name)).view(types[info.dtype]).reshape(info.shape)
        for name, info in file.tensors.items()
    }
    file.close()
    change(tensors)
    write_safetensors(path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(quantised)
