"""Optimizers and schedules against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from treadle_server.training import optimizers, schedules
from treadle_server.training.optimizers import OPTIMIZERS, adamw, lion, sgd


def test_adamw_by_hand() -> None:
    """Two steps of one number: bias-corrected moments, decay apart from the gradient."""
    parameter, m, v = np.array([2.0]), np.zeros(1), np.zeros(1)
    adamw(parameter, np.array([0.5]), (m, v), 1, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.5)
    assert parameter[0] == pytest.approx(2.0 * 0.95 - 0.1)
    adamw(parameter, np.array([-0.5]), (m, v), 2, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    assert (m[0], v[0]) == (pytest.approx(-0.005), pytest.approx(0.004975))
    assert parameter[0] == pytest.approx(1.8 + 0.1 * 0.005 / 0.19 / np.sqrt(0.004975 / 0.0199))


def test_sgd_by_hand() -> None:
    """The velocity keeps its share of what it was."""
    parameter, velocity = np.array([1.0]), np.zeros(1)
    for step in (1, 2):
        sgd(parameter, np.array([1.0]), (velocity,), step, lr=0.1, momentum=0.5)
    assert velocity[0] == 1.5
    assert parameter[0] == pytest.approx(1.0 - 0.1 - 0.15)


def test_lion_by_hand() -> None:
    """Each step is as long as the rate, whatever the gradient."""
    parameter, momentum = np.array([1.0, 1.0]), np.zeros(2)
    lion(parameter, np.array([100.0, -1e-6]), (momentum,), 1, lr=0.1, weight_decay=1.0)
    assert parameter == pytest.approx([0.8, 1.0])
    assert momentum == pytest.approx([1.0, -1e-8])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix treated three numbers at a time ends as one treated whole, to the bit."""
    optimizer, rng = OPTIMIZERS[name], np.random.default_rng(2)
    start, gradient = rng.standard_normal((2, 4, 5)).astype(np.float32)
    results = []
    for piece in (optimizers.PIECE, 3):
        monkeypatch.setattr(optimizers, "PIECE", piece)
        parameter, state = start.copy(), [np.zeros_like(start) for _ in optimizer.state_names]
        optimizer.apply(parameter, gradient, state, 1, lr=0.1, weight_decay=0.1)
        results.append(parameter)
    assert results[0].dtype == np.float32
    assert np.array_equal(*results)


def test_constant_warms_up() -> None:
    """In equal parts, none of them 0."""
    schedule = schedules.constant(1.0, warmup_steps=4)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_final_rate() -> None:
    """Halfway between the warm-up and the end it is halfway down, and past the end it stays."""
    schedule = schedules.linear(1.0, num_steps=12, warmup_steps=2, final_lr=0.2)
    assert [schedule(step) for step in (0, 1, 2, 7, 12, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_cosine_is_flat_at_both_ends() -> None:
    """It falls slowly, fast and slowly again."""
    schedule = schedules.cosine(1.0, num_steps=10)
    assert [schedule(step) for step in (0, 5, 10, 11)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert schedule(0) - schedule(1) < schedule(4) - schedule(5)
