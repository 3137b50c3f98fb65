"""Every backward half against finite differences of its forward half."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import pytest
from treadle_plugin_api.backend import LowRank
from treadle_plugin_api.decoder_config import MlpConfig, MoeConfig
from treadle_server.model import activations, adapters, attention, moe, ops, ops_backward, rotary
from treadle_server.model.alibi import Alibi
from treadle_server.model.attention import Scoring
from treadle_server.testing import check_grads

RNG_SEED = 5
EPS = 1e-5


def draw(*shape: int) -> np.ndarray:
    """Return normal numbers, the same each time."""
    return np.random.default_rng(RNG_SEED).standard_normal(shape)


def check_linear() -> None:
    """Three arrays, a function each."""

    def backward(dy: np.ndarray, x: np.ndarray, weight: np.ndarray, _: np.ndarray) -> list[np.ndarray]:
        dweight, dbias = ops_backward.linear_weight_backward(x, dy), ops_backward.linear_bias_backward(dy)
        return [ops_backward.linear_backward(weight, dy), dweight, dbias]

    check_grads(ops.linear_forward, backward, draw(5, 3), draw(4, 3), draw(4))


def check_low_rank() -> None:
    """Rows that count by a share of theirs: the input's gradient is that of the product before it was multiplied."""
    share = np.array([[1.0], [0.5], [0.0], [2.0], [-1.0]])

    def forward(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return share * (0.7 * (x @ a.T) @ b.T)

    def backward(dy: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        dx, da, db = adapters.low_rank_backward(x, LowRank(a, b, 0.7), dy, share)
        return [share * dx, da, db]

    check_grads(forward, backward, draw(5, 3), draw(2, 3), draw(4, 2))


def check_embedding() -> None:
    """A row looked up three times."""
    ids = np.array([2, 0, 2, 5, 2])

    def backward(dy: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
        dweight = np.zeros_like(weight)
        ops_backward.embedding_backward(ids, dy, dweight)
        return [dweight]

    check_grads(lambda weight: weight[ids], backward, draw(6, 3))


def check_rms_norm() -> None:
    """Each head with scales of its own."""
    check_grads(
        lambda x, w: ops.rms_norm_forward(x, w, EPS),
        lambda dy, x, w: ops_backward.rms_norm_backward(x, w, EPS, dy),
        draw(4, 2, 6),
        draw(2, 6),
    )


def check_layer_norm() -> None:
    """Scale and offset."""
    check_grads(
        lambda x, w, b: ops.layer_norm_forward(x, w, b, EPS),
        lambda dy, x, w, b: ops_backward.layer_norm_backward(x, w, b, EPS, dy),
        draw(4, 6),
        draw(6),
        draw(6),
    )


def check_softmax() -> None:
    """Along the last axis."""
    check_grads(
        ops.softmax_forward, lambda dy, x: [ops_backward.softmax_backward(ops.softmax_forward(x), dy)], draw(3, 5)
    )


def check_softcap() -> None:
    """Made from the result."""
    check_grads(
        lambda x: ops.softcap_forward(x, 2.0),
        lambda dy, x: [ops_backward.softcap_backward(ops.softcap_forward(x, 2.0), 2.0, dy)],
        draw(3, 5),
    )


def check_sigmoid() -> None:
    """Made from the result."""
    check_grads(ops.sigmoid_forward, lambda dy, x: [ops_backward.sigmoid_backward(ops.sigmoid_forward(x), dy)], draw(9))


def check_activation(name: str) -> Callable[[], None]:
    """Return the check of an activation on both sides of 0, never at 0."""
    forward, slope = activations.ACTIVATIONS[name], activations.SLOPES[name]
    return lambda: check_grads(
        lambda x: forward(x, None), lambda dy, x: [dy * slope(x)[1]], np.linspace(-4, 4, 20) + 0.01
    )


def check_hidden() -> None:
    """Gate beside up: the derivatives come in the place of up, with what the forward half returned."""
    mlp = MlpConfig(hidden_dim=3, activation="silu", gated=True)

    def backward(dy: np.ndarray, up: np.ndarray) -> list[np.ndarray]:
        hidden, slopes = activations.hidden_backward(mlp, up.copy())
        np.testing.assert_allclose(hidden, activations.hidden_forward(mlp, up.copy()), rtol=0, atol=1e-14)
        return [np.tile(dy, 2) * slopes]

    check_grads(lambda up: activations.hidden_forward(mlp, up.copy()), backward, draw(4, 6))


def check_rotary() -> None:
    """Scaled angles."""
    cos, sin = rotary.rotary_table(np.array([1.0, 0.1]), np.arange(5), np.float64, 1.3)
    check_grads(
        lambda x: rotary.rotary_forward(x, cos, sin),
        lambda dy, x: [rotary.rotary_backward(dy, cos, sin)],
        draw(5, 3, 2, 2),
    )


def check_attention(scoring: Scoring | None = None) -> None:
    """Grouped queries; by default with a window, a soft-cap and biases."""
    scoring = scoring or Scoring(0.5, window=3, softcap=1.5, alibi=Alibi.of(4))

    def forward(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = np.empty_like(q)
        attention.attention_forward(q, keys, values, 0, scoring, out)
        return out

    def backward(dy: np.ndarray, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
        return attention.attention_backward(q, keys, values, scoring, forward(q, keys, values), dy)

    rng = np.random.default_rng(RNG_SEED)
    check_grads(forward, backward, *(rng.standard_normal(shape) for shape in ((7, 2, 2, 3), (2, 7, 3), (2, 7, 3))))


def check_route() -> None:
    """Weights normalised and not."""
    for normalized in (True, False):
        config = MoeConfig(num_experts=5, top_k=2, hidden_dim=1, normalized=normalized)

        def backward(dy: np.ndarray, scores: np.ndarray, config: MoeConfig = config) -> list[np.ndarray]:
            ids, weights = moe.route_forward(scores, config)
            return [moe.route_backward(scores, ids, config, weights, dy)]

        check_grads(lambda scores, config=config: moe.route_forward(scores, config)[1], backward, draw(4, 5))


CHECKS = MappingProxyType(
    {
        "linear": check_linear,
        "linear_weight": check_linear,
        "linear_bias": check_linear,
        "low_rank": check_low_rank,
        "embedding": check_embedding,
        "rms_norm": check_rms_norm,
        "layer_norm": check_layer_norm,
        "softmax": check_softmax,
        "softcap": check_softcap,
        "sigmoid": check_sigmoid,
        "rotary": check_rotary,
        "attention": check_attention,
        "route": check_route,
        "hidden": check_hidden,
        **{name: check_activation(name) for name in activations.SLOPES},
    }
)


@pytest.mark.parametrize("op", sorted(CHECKS))
def test_backward_is_the_gradient_of_forward(op: str) -> None:
    """An op's backward half promises what its forward half does."""
    CHECKS[op]()


def test_every_backward_half_is_checked() -> None:
    """A backward half without a check above fails here."""
    found = {
        name.removesuffix("_backward").removesuffix("_slope")
        for module in (ops_backward, activations, adapters, attention, rotary, moe)
        for name, _ in inspect.getmembers(module, inspect.isfunction)
        if name.endswith(("_backward", "_slope")) and not name.startswith("_")
    }
    assert found == CHECKS.keys()


@pytest.mark.parametrize("scoring", [Scoring(0.5), Scoring(0.5, window=2), Scoring(0.5, softcap=1.0)])
def test_attention_backward_in_blocks_is_exact_too(scoring: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two query rows give the gradient that one block gives."""
    monkeypatch.setattr(attention, "BACKWARD_SCORES", 0)
    monkeypatch.setattr(attention, "MIN_BACKWARD_ROWS", 2)
    check_attention(scoring)


def test_check_grads_finds_a_wrong_gradient() -> None:
    """A gradient that is off by a part in a thousand is refused, and the message names the argument."""
    with pytest.raises(AssertionError, match="argument 0: by its gradient"):
        check_grads(np.tanh, lambda dy, x: [1.001 * dy / np.cosh(x) ** 2], draw(5))


def test_embedding_backward_of_no_tokens_adds_nothing() -> None:
    """An empty batch leaves the gradient alone."""
    dweight = np.zeros((3, 2))
    ops_backward.embedding_backward(np.zeros(0, np.int64), np.zeros((0, 2)), dweight)
    assert not dweight.any()
