"""XTC, Mirostat and Adaptive-P: hand values, and draws that agree with the exact distribution."""

import math

import numpy as np
import pytest
from treadle_plugin_api import SamplingContext, Select
from treadle_plugin_api.random import stage_key
from treadle_samplers import AdaptiveP, Categorical, Mirostat, Xtc

INF = np.inf
HALVES = (0.5, 0.25, 0.125, 0.0625, 0.0625)
COUNTS = [20_000, pytest.param(100_000, marks=pytest.mark.soak)]


def logs(*probabilities: float) -> np.ndarray:
    """Logits [vocab] float32 of a distribution; 0 is masked."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(probabilities)) + 7).astype(np.float32)


def kept(row: np.ndarray) -> list[int]:
    """Ids that are not masked."""
    return np.flatnonzero(row > -INF).tolist()


def agrees(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's test at one in ten thousand; what is impossible must not occur."""
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    # The quantile by Wilson and Hilferty; 3.719 is the normal one.
    freedom = possible.sum() - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return counts[~possible].sum() == 0 and statistic < quantile


def draws(stage: Select, logits: np.ndarray, count: int, before: Xtc | None = None) -> np.ndarray:
    """Tokens drawn at `count` positions from a fresh state, counted by id; `before` filters each row first."""
    context = SamplingContext(vocab_size=len(logits), seed=11)
    state, counts = stage.start(context), np.zeros(len(logits), dtype=int)
    for _ in range(count):
        row = logits
        if before is not None:
            context.enter(stage_key("xtc"))
            row = before.apply(logits, context)
        context.enter(stage_key(stage.name))
        counts[stage.apply(row, context, state)] += 1
        context.append(0)
    return counts


# XTC.


@pytest.mark.parametrize(
    ("threshold", "probabilities", "expected"),
    [
        (0.15, (0.4, 0.3, 0.2, 0.1), [2, 3]),
        (0.2, (0.4, 0.3, 0.2, 0.1), [2, 3]),  # inclusive
        (0.25, (0.4, 0.3, 0.2, 0.1), [1, 2, 3]),
        (0.35, (0.4, 0.3, 0.2, 0.1), [0, 1, 2, 3]),  # one candidate
        (0.45, (0.4, 0.3, 0.2, 0.1), [0, 1, 2, 3]),  # none
        (0.2, (0.3, 0.3, 0.3, 0.1), [2, 3]),  # of the tied the last is kept
        (0.0, (0.4, 0.3, 0.2, 0.1), [3]),
        (0.15, (0, 0.4, 0, 0.3, 0.2, 0.1), [4, 5]),
        (0.1, (1.0,), [0]),
    ],
)
def test_xtc_by_hand(threshold: float, probabilities: tuple[float, ...], expected: list[int]):
    """With P = 1 the top choices but the least likely go."""
    stage = Xtc(xtc_probability=1.0, xtc_threshold=threshold)
    assert kept(stage.apply(logs(*probabilities), SamplingContext(vocab_size=len(probabilities)))) == expected


@pytest.mark.parametrize("count", COUNTS)
def test_xtc_acts_as_often_as_it_says(count: int):
    """A mixture: (1 - P) of the distribution, P of it without the top choices."""
    p, shortened = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0, 0, 2 / 3, 1 / 3])
    stage = Xtc(xtc_probability=0.3, xtc_threshold=0.15)
    assert agrees(draws(Categorical(), logs(*p), count, before=stage), 0.7 * p + 0.3 * shortened)


# Mirostat.


def mirostat_keeps(version: int, mu: float, logits: np.ndarray) -> list[int]:
    """Ids that Mirostat draws among when it allows `mu` bits."""
    stage = Mirostat(mirostat=version, mirostat_tau=mu / 2)
    context = SamplingContext(vocab_size=len(logits))
    return kept(stage.distribution(logits, context, stage.start(context)))


@pytest.mark.parametrize(("mu", "expected"), [(0, [0]), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3, 4])])
def test_mirostat_2_by_hand(mu: float, expected: list[int]):
    """Surprises are 1, 2, 3, 4, 4 bits; what is allowed is inclusive."""
    assert mirostat_keeps(2, mu, logs(*HALVES)) == expected


@pytest.mark.parametrize(
    ("exponent", "mu", "num_kept"),
    [
        (2.0, 2, 2),  # sqrt(4 / (1 - 1/8)) = 2.138
        (2.0, 4, 4),  # sqrt(16 / .875) = 4.276
        (2.0, 0, 1),  # sqrt(1 / .875) = 1.069
        (0.5, 2, 1),  # (.5 * 4 / (sqrt 8 - 1))^2 = 1.196
        (0.5, 3, 4),  # (.5 * 8 / (sqrt 8 - 1))^2 = 4.786
        (1.0, 3, 3),  # 8 / ln 8 = 3.847
        (0.5, 90, 8),
        (2.0, 200, 8),
    ],
)
def test_mirostat_1_by_hand(exponent: float, mu: float, num_kept: int):
    """On Zipf's law itself the fitted exponent is exact: eight tokens with p ~ rank^-s."""
    weights = np.arange(1, 9) ** -exponent
    assert mirostat_keeps(1, mu, logs(*weights / weights.sum())) == list(range(num_kept))


@pytest.mark.parametrize(("mu", "num_kept"), [(2.9, 8), (1.0, 1)])
def test_mirostat_1_on_equal_logits(mu: float, num_kept: int):
    """No slope to fit: all, or the first."""
    assert mirostat_keeps(1, mu, np.zeros(8, dtype=np.float32)) == list(range(num_kept))


@pytest.mark.parametrize(("token_id", "mu"), [(0, 2.0415037), (1, 1.9415037)])
def test_mirostat_moves_by_the_surprise(token_id: int, mu: float):
    """Among 1/2 and 1/4, renormalised, the surprises are .585 and 1.585 bits: mu moves by .1 times what exceeds 1."""
    stage, context = Mirostat(mirostat_tau=1.0), SamplingContext(vocab_size=5)
    state = stage.start(context)
    while stage.apply(logs(*HALVES), context, state) != token_id:
        context.append(0)
    stage.accept(state, token_id)
    assert state.mu == pytest.approx(mu)


def test_mirostat_keeps_near_its_target():
    """Over a text the mean surprise comes to tau."""
    logits = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 2
    stage, context = Mirostat(mirostat_tau=3.0), SamplingContext(vocab_size=200, seed=1)
    state, surprises = stage.start(context), []
    for _ in range(2000):
        token_id = stage.apply(logits, context, state)
        surprises.append(state.drawn[1])
        stage.accept(state, token_id)
        context.append(token_id)
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_draws_among_what_it_keeps(count: int, version: int):
    """Draws among eight tokens of Zipf's law agree with the renormalised distribution of the first four."""
    weights = np.arange(1, 9) ** -2.0
    mu = 4.0 if version == 1 else math.log2(weights.sum() * 16)
    logits = logs(*weights / weights.sum())
    assert mirostat_keeps(version, mu, logits) == [0, 1, 2, 3]
    kept_weights = np.where(np.arange(8) < 4, weights, 0)
    stage = Mirostat(mirostat=version, mirostat_tau=mu / 2)
    assert agrees(draws(stage, logits, count), kept_weights / kept_weights.sum())


# Adaptive-P.


def adaptive_logits(p: float, aim: float) -> float:
    """The transform, as it is written."""
    distance = abs(p - aim) / 0.3
    return 5 - 10 * distance**2 / (1 + distance)


def test_adaptive_p_by_hand():
    """At the target the peak of 5; .25 away 10 * .8333^2 / 1.8333 less; masked tokens stay masked."""
    stage, context = AdaptiveP(adaptive_target=0.25), SamplingContext(vocab_size=5)
    row = stage.distribution(logs(0.5, 0.25, 0, 0.125, 0.125), context, stage.start(context))
    np.testing.assert_allclose(row, [1.212121, 5, -INF, 3.774510, 3.774510], rtol=1e-5)


def test_adaptive_p_aims_the_other_way_after_a_token():
    """Token 0 (.5) lifts the mean from .25 to .275 by decay .9, so the next aim is .225."""
    stage, context = AdaptiveP(adaptive_target=0.25), SamplingContext(vocab_size=4)
    state, logits = stage.start(context), logs(0.5, 0.25, 0.125, 0.125)
    while stage.apply(logits, context, state) != 0:
        context.append(0)
    stage.accept(state, 0)
    assert (state.weighted_sum, state.total_weight) == pytest.approx((2.75, 10))
    expected = [adaptive_logits(p, 0.225) for p in (0.5, 0.25, 0.125, 0.125)]
    np.testing.assert_allclose(stage.distribution(logits, context, state), expected, rtol=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_adaptive_p_draws_from_its_transform(count: int):
    """Draws agree with the softmax of the hand-written transform."""
    p = (0.45, 0.25, 0.15, 0.1, 0.05)
    weights = np.array([math.exp(adaptive_logits(one, 0.3)) for one in p])
    assert agrees(draws(AdaptiveP(adaptive_target=0.3), logs(*p), count), weights / weights.sum())


@pytest.mark.parametrize(
    ("stage", "field"), [(Mirostat(), "mu"), (Mirostat(mirostat=1), "mu"), (AdaptiveP(), "weighted_sum")], ids=repr
)
def test_only_its_own_draw_moves_a_select(stage: Select, field: str):
    """A token that was not drawn here, or is accepted a second time, leaves the state as it is."""
    context = SamplingContext(vocab_size=5)
    state = stage.start(context)
    before = getattr(state, field)
    stage.accept(state, 3)
    assert getattr(state, field) == before
    drawn = [stage.apply(logs(*HALVES), context, state) for _ in range(2)][1]
    cloned = stage.clone(state)
    stage.accept(state, (drawn + 1) % 5)
    assert getattr(state, field) == before
    stage.accept(cloned, drawn)
    moved = getattr(cloned, field)
    assert moved != before
    stage.accept(cloned, drawn)
    assert getattr(cloned, field) == moved
