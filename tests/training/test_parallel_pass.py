"""Batches in parts, a thread each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from treadle_server import Trainer
from treadle_server.errors import TrainingError
from treadle_server.training import parallel_pass
from treadle_server.training.batches import make_batch

ROWS = [[5, 9, 2, 7, 7, 1], [3, 8, 4], [6, 6, 1, 0], [2]]
LABELS = [[5, 9, -100, 7, 7, 1], [3, -100, 4], [-100, -100, -100, -100], [2]]
WEIGHTS = [[1.0, 0.5, 1.0, 2.0, 1.0, 0.25], [1.0, 1.0, 3.0], [1.0] * 4, [1.0]]


@pytest.fixture
def parted(load_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Loads a trainer whose batches fall into so many parts."""

    def load(num_parts: int, **options: Any) -> Trainer:
        monkeypatch.setattr(parallel_pass, "MIN_TOKENS", 1)
        one = load_trainer(dtype="float64", **options)
        one._threads.number = num_parts
        return one

    return load


@pytest.mark.parametrize("num_parts", [2, 3, 20])
def test_parts_make_what_the_whole_makes(parted: Callable[..., Trainer], num_parts: int) -> None:
    """Loss, log-probabilities and gradients, also where a part has no label that counts."""
    whole, parts = parted(1), parted(num_parts)
    one, other = (trainer.forward_backward(ROWS, LABELS, weights=WEIGHTS, z_loss=0.1) for trainer in (whole, parts))
    assert other.loss == pytest.approx(one.loss, rel=1e-12)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-12)
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12)
    expected = whole.gradients()
    for name, gradient in parts.gradients().items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_same_number_of_parts_makes_the_same_bits(parted: Callable[..., Trainer]) -> None:
    """Whichever thread ends first."""
    trainers = parted(3), parted(3)
    for trainer in trainers:
        trainer.forward_backward(ROWS)
    first, second = (trainer.gradients() for trainer in trainers)
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_part_that_overflows_is_refused(parted: Callable[..., Trainer]) -> None:
    """A thread warns of nothing, and what it made is looked at."""
    one = parted(2)
    one._decoder.parameters["embedding.weight"][3] = np.inf
    with pytest.raises(TrainingError, match="not finite"):
        one.forward_backward(ROWS)


def test_a_large_model_has_few_parts(parted: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part beyond the first has gradients of its own; where only little is trained they are small."""
    one, batch = parted(4), make_batch(ROWS, None, 40)
    size = sum(array.nbytes for array in one._decoder.parameters.values())
    monkeypatch.setattr(parallel_pass, "MAX_GRADIENT_BYTES", size)
    assert parallel_pass._num_parts(one._decoder, batch, None, 4) == 2
    assert parallel_pass._num_parts(one._decoder, batch, ["final_norm.weight"], 4) == 4


def test_a_batch_splits_between_rows() -> None:
    """Parts hold whole rows, about as many tokens each, and lose nothing."""
    batch = make_batch(ROWS, LABELS, 40, WEIGHTS)
    parts = batch.split(2)
    assert [part.batch.starts.tolist() for part in parts] == [[0, 6, 9], [0, 4, 5]]
    assert [part.predicting.tolist() for part in parts] == [[0, 2, 3, 4, 7], []]
    assert np.concatenate([part.targets.ids for part in parts]).tolist() == batch.targets.ids.tolist()
