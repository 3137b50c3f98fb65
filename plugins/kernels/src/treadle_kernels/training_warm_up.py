"""Compiling what trains ahead, once, in a process of its own, whose gradients are compared with NumPy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from treadle_plugin_api.backend import Array, Batch, DifferentiableBackend
from treadle_plugin_api.loss import Targets

from treadle_kernels.compiled import cache_folder
from treadle_kernels.warm_up import SMALL, TOLERANCE, end_with_parent, leave_mark

MARK = "training_checked"


def check_training() -> None:
    """Train a small model for a step and compare it with NumPy's; this is what compiles."""
    from treadle_server.model.numpy_backend import NumpyBackend

    from treadle_kernels.training_backend import TrainingBackend

    made = _step(TrainingBackend())
    for name, expected in _step(NumpyBackend()).items():
        error = float(np.abs(made[name] - expected).max() / np.abs(expected).max())
        if not error < TOLERANCE:
            raise RuntimeError(f"compiled training is off by {error} of the largest number of {name}")


def _step(backend: DifferentiableBackend[Any]) -> dict[str, Array]:
    """Return a small model's gradients, and the steps that they make of its parameters."""
    from treadle_server.model.params import Params, random_arrays
    from treadle_server.model.trainable import TrainableDecoder
    from treadle_server.training.losses import cross_entropy
    from treadle_server.training.optimizers import adamw

    decoder = TrainableDecoder(SMALL, Params.from_arrays(random_arrays(SMALL, seed=0, scale=0.2)), backend=backend)
    saved: dict[str, Array] = {}
    hidden = decoder.forward_saving(Batch.of([np.arange(39), np.arange(20, 23)]), saved)
    targets = Targets(np.arange(len(hidden)), np.linspace(0, 1, len(hidden)))
    dlogits = decoder.faster(cross_entropy)(decoder.head(hidden), targets, label_smoothing=0.1, z_loss=0.1).dlogits
    grads = {name: np.zeros_like(decoder.parameters[name]) for name in decoder.head_parameters()}
    dhidden = decoder.head_backward(hidden, dlogits, grads)
    grads = decoder.backward(saved, dhidden) | {f"{name} (head)": gradient for name, gradient in grads.items()}
    steps: dict[str, Array] = {}
    for name, gradient in grads.items():
        steps[f"step of {name}"], *state = np.zeros((3, gradient.size), np.float32)
        decoder.faster(adamw)(steps[f"step of {name}"], gradient.reshape(-1), state, 1, lr=0.1, eps=1.0)
    return grads | steps


def main(folder: Path) -> None:
    """Compile, compare, and mark the cache as complete."""
    end_with_parent()
    check_training()
    leave_mark(folder / MARK)


if __name__ == "__main__":
    main(cache_folder())
