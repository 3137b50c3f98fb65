"""Every reference model's gradients against finite differences of its own forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Batch
from treadle_server import Trainer
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.trainable import TrainableDecoder
from treadle_server.testing import check_decoder_grads

MODELS = sorted(path.name for path in (Path(__file__).parents[1] / "golden" / "models").iterdir())


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_forward_pass(model: str, golden: Path) -> None:
    """Every kind of parameter of every family, in float64, moved by itself."""
    with load_checkpoint(golden / "models" / model) as checkpoint:
        check_decoder_grads(checkpoint.config, checkpoint.params)


@pytest.mark.parametrize("model", MODELS)
def test_float32_gradients_are_those_of_float64(model: str, golden: Path) -> None:
    """To a ten-thousandth of each tensor's largest, and in float32 throughout."""
    narrow, wide = (Trainer.load(golden / "models" / model, dtype=dtype) for dtype in ("float32", "float64"))
    rows = np.random.default_rng(0).integers(0, 90, (2, 8))
    for trainer in (narrow, wide):
        trainer.forward_backward(rows)
    expected = wide.gradients()
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for name, gradient in narrow.gradients().items():
        assert gradient.dtype == np.float32, name
        # A gradient that is 0 but for rounding has no digits to compare.
        scale = max(float(np.abs(expected[name]).max()), 1e-3 * largest)
        assert np.abs(gradient - expected[name]).max() <= 1e-4 * scale, name


@pytest.mark.parametrize("model", MODELS)
def test_saving_changes_no_bit_of_the_forward_pass(model: str, golden: Path) -> None:
    """The hidden states are those of inference, whatever was kept for the backward pass."""
    with load_checkpoint(golden / "models" / model) as checkpoint:
        decoder = TrainableDecoder(checkpoint.config, checkpoint.params)
    batch = Batch.of([[1, 2, 3, 4, 5], [6, 7]])
    assert np.array_equal(decoder.forward_saving(batch, {}), decoder.forward(batch))


@pytest.mark.parametrize("model", ["gemma", "llama_mqa_bf16", "gpt2", "mixtral"])
def test_parameters_are_the_checkpoints(model: str, golden: Path) -> None:
    """The arrays to be trained hold the stored numbers, also where the decoder computes with one more."""
    with load_checkpoint(golden / "models" / model) as checkpoint:
        decoder = TrainableDecoder(checkpoint.config, checkpoint.params)
        for name, weight in checkpoint.params.items():
            stored = np.empty(weight.shape, np.float32)
            weight.read_into(stored)
            assert np.array_equal(decoder.parameters[name], stored), name
