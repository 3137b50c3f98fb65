"""Losses: their gradients, and what they equal in cases that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from treadle_plugin_api.loss import LossFunction, MissingTargetError, Targets
from treadle_server.testing import check_grads
from treadle_server.training.losses import LOSSES, cross_entropy, importance_sampling, ppo

IDS = np.array([3, 0, 5, 1])
LOGITS = np.random.default_rng(1).standard_normal((4, 6)) * 2
WEIGHTS = np.array([1.0, 0.5, 2.0, 1.0])
# Ratios from far below to far above the clip range, with advantages of both signs.
OLD_LOGPROBS = np.array([-0.5, -4.0, -1.0, -3.5])
TARGETS = Targets(IDS, WEIGHTS, OLD_LOGPROBS, np.array([1.0, -2.0, 0.5, 3.0]))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities, the plain way."""
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (cross_entropy, {}),
        (cross_entropy, {"label_smoothing": 0.1}),
        (cross_entropy, {"z_loss": 0.01}),
        (cross_entropy, {"label_smoothing": 0.2, "z_loss": 0.1}),
        (importance_sampling, {}),
        (ppo, {}),
        (ppo, {"clip_range": 0.5}),
    ],
)
def test_dlogits_is_the_gradient_of_the_weighted_sum(loss: LossFunction, options: dict[str, Any]) -> None:
    """Every loss, under every option."""

    def backward(dy: np.ndarray, logits: np.ndarray) -> list[np.ndarray]:
        return [loss(logits.copy(), TARGETS, **options).dlogits * dy]

    check_grads(lambda logits: loss(logits.copy(), TARGETS, **options).losses.sum(), backward, LOGITS)


def test_cross_entropy_is_minus_the_log_probability() -> None:
    """Each row's, times its weight."""
    result = cross_entropy(LOGITS.copy(), TARGETS)
    expected = log_softmax(LOGITS)[np.arange(4), IDS]
    assert np.allclose(result.logprobs, expected)
    assert np.allclose(result.losses, -expected * WEIGHTS)


def test_label_smoothing_mixes_in_all_tokens() -> None:
    """At 1 every token is as right as any other."""
    result = cross_entropy(LOGITS.copy(), Targets(IDS, np.ones(4)), label_smoothing=1.0)
    assert np.allclose(result.losses, -log_softmax(LOGITS).mean(1))


def test_z_loss_adds_the_square_of_log_z() -> None:
    """Times its factor."""
    plain, added = (cross_entropy(LOGITS.copy(), Targets(IDS, np.ones(4)), z_loss=z).losses for z in (0.0, 0.5))
    assert np.allclose(added - plain, 0.5 * np.log(np.exp(LOGITS).sum(1)) ** 2)


def test_importance_sampling_on_the_sampling_policy_is_the_policy_gradient() -> None:
    """A ratio of 1 leaves advantage times the log-probability's gradient: that of weighted cross-entropy."""
    logprobs = log_softmax(LOGITS)[np.arange(4), IDS]
    advantages = np.array([1.0, 2.0, 0.5, 3.0])
    found = importance_sampling(LOGITS.copy(), Targets(IDS, np.ones(4), logprobs, advantages))
    assert np.allclose(found.losses, -advantages)
    assert np.allclose(found.dlogits, cross_entropy(LOGITS.copy(), Targets(IDS, advantages)).dlogits)


def test_ppo_has_no_gradient_past_the_clip_range() -> None:
    """A good token that is likelier already, and a bad one that is unlikelier, are left alone."""
    logprobs = log_softmax(LOGITS)[np.arange(4), IDS]
    old = logprobs + np.array([-1.0, 1.0, 0.0, 0.0])
    found = ppo(LOGITS.copy(), Targets(IDS, np.ones(4), old, np.array([1.0, -1.0, 1.0, -1.0])))
    assert np.allclose(found.losses, [-1.2, 0.8, -1.0, 1.0])
    assert not found.dlogits[:2].any()
    assert found.dlogits[2:].any(axis=1).all()


@pytest.mark.parametrize("loss", [importance_sampling, ppo])
@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def test_a_policy_loss_asks_for_its_inputs(loss: LossFunction, field: str) -> None:
    """The one that is missing is named."""
    given = {"old_logprobs": np.zeros(4), "advantages": np.zeros(4)}
    del given["old_logprobs" if field == "logprobs" else field]
    with pytest.raises(MissingTargetError, match="must be given") as caught:
        loss(LOGITS.copy(), Targets(IDS, np.ones(4), **given))
    assert caught.value.field == field


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_float32_stays_float32(name: str) -> None:
    """The gradient has the logits' dtype, and is close to that of float64."""
    narrow = LOSSES[name].function(LOGITS.astype(np.float32), TARGETS).dlogits
    assert narrow.dtype == np.float32
    assert np.allclose(narrow, LOSSES[name].function(LOGITS.copy(), TARGETS).dlogits, atol=1e-5)
