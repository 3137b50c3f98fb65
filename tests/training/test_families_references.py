"""Every reference model's loss and gradients against PyTorch's, worked out wholly in float64."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = sorted(path.name for path in (GOLDEN / "models").iterdir())


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What `make_gradients.py` wrote."""
    return dict(np.load(GOLDEN / "train" / "families.npz"))


def numbers(gradient: np.ndarray) -> np.ndarray:
    """Return its dot products with three random arrays, and its norm, as `make_gradients.py` does."""
    rng = np.random.default_rng(zlib.crc32(repr(gradient.shape).encode()))
    products = rng.standard_normal((3, *gradient.shape)) * gradient
    return np.array([*products.reshape(3, -1).sum(1), np.linalg.norm(gradient)])


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_agree(model: str, load_trainer: Any, expected: dict[str, Any]) -> None:
    """To 1e-9 of each gradient's norm: PyTorch's tensors are ours, and none of ours is another's."""
    trainer = load_trainer(f"models/{model}", dtype="float64")
    assert trainer.forward_backward(expected["input_ids"]).loss == pytest.approx(
        float(expected[f"{model}/loss"]), 1e-11
    )
    grads = trainer.gradients()
    wanted = {
        name.removeprefix(f"{model}/grad/"): value for name, value in expected.items() if f"{model}/grad/" in name
    }
    assert len(wanted) == len(grads)
    # The softmax takes no notice of a key's bias: its gradient is nothing but rounding.
    floor = 1e-6 * max(value[3] for value in wanted.values())
    for name, gradient in grads.items():
        # Some folders leave out the prefix that every module of the model has.
        full_name = next(prefix + name for prefix in ("", "transformer.", "model.") if prefix + name in wanted)
        error = np.abs(numbers(gradient) - wanted[full_name]).max()
        assert error <= 1e-9 * max(float(wanted[full_name][3]), floor), name
