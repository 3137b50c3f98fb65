"""Losses, gradients and AdamW steps against PyTorch's, worked out wholly in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

MODELS = ("llama", "gpt2")
STEP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
Reference = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_every_gradient_agrees(
    model: str, dtype: str, tolerance: float, load_trainer: Any, reference: Reference
) -> None:
    """Relative to the tensor's largest, under the file's names, with padding and ignored labels."""
    expected, trainer = reference(model), load_trainer(f"train/{model}", dtype=dtype)
    result = trainer.forward_backward(expected["input_ids"], expected["labels"])
    grads = trainer.gradients()
    assert result.loss == pytest.approx(float(expected["losses"][0]), abs=tolerance)
    assert result.grad_norm == pytest.approx(float(expected["grad_norms"][0]), rel=tolerance)
    assert grads.keys() == {name.removeprefix("grad/") for name in expected if name.startswith("grad/")}
    largest = max(float(np.abs(expected[f"grad/{name}"]).max()) for name in grads)
    for name, grad in grads.items():
        wanted = expected[f"grad/{name}"]
        # A key's bias has no gradient but rounding: the softmax takes no notice of it.
        floor = 1e-8 * largest if dtype == "float64" else 1e-3 * largest
        assert np.abs(grad - wanted).max() <= tolerance * max(float(np.abs(wanted).max()), floor), name


@pytest.mark.parametrize("model", MODELS)
def test_five_steps_agree(model: str, load_trainer: Any, reference: Reference) -> None:
    """Losses and norms of each step, and the parameters after 1, 2 and 5, in float64."""
    expected, trainer = reference(model), load_trainer(f"train/{model}", dtype="float64")
    for step in range(5):
        result = trainer.forward_backward(expected["input_ids"], expected["labels"])
        assert result.loss == pytest.approx(float(expected["losses"][step]), abs=1e-9)
        assert trainer.optim_step(**STEP).grad_norm == pytest.approx(float(expected["grad_norms"][step]), rel=1e-9)
        for name, array in trainer.parameters().items() if step + 1 in (1, 2, 5) else ():
            assert np.abs(array - expected[f"param{step + 1}/{name}"]).max() < 1e-9, name
    assert trainer.compute_loss(expected["input_ids"], expected["labels"]).loss == pytest.approx(
        float(expected["losses"][5]), abs=1e-9
    )


@pytest.mark.parametrize("model", MODELS)
def test_five_steps_in_float32_lose_as_much(model: str, load_trainer: Any, reference: Reference) -> None:
    """The losses of a float32 trainer follow the float64 ones."""
    expected, trainer = reference(model), load_trainer(f"train/{model}")
    for step in range(5):
        result = trainer.forward_backward(expected["input_ids"], expected["labels"])
        assert result.loss == pytest.approx(float(expected["losses"][step]), abs=1e-4)
        trainer.optim_step(**STEP)
