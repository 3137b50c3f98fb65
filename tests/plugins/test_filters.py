"""The filters and the dynamic temperature: hand values, edges, and definitions spelt out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api import SamplingContext, Stage
from treadle_samplers import (
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    PLess,
    TailFree,
    Temperature,
    TopA,
    TopH,
    TopNSigma,
    TypicalP,
)

INF = np.inf
# Entropy 1.875 bits, 1.29965 nats; sum of squares .3359375.
HALVES = (0.5, 0.25, 0.125, 0.0625, 0.0625)


def logs(*probabilities: float) -> np.ndarray:
    """Logits [vocab] float32 of a distribution, away from 0 so that no stage can rely on that; 0 is masked."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(probabilities)) + 7).astype(np.float32)


def after(stage: Stage, logits: np.ndarray) -> np.ndarray:
    """The row after the stage."""
    return stage.apply(logits, SamplingContext(vocab_size=len(logits)))


def kept(stage: Stage, logits: np.ndarray) -> list[int]:
    """Ids that the stage keeps; what it keeps, it leaves as it was."""
    row = after(stage, logits)
    ids = np.flatnonzero(row > -INF)
    assert (row[ids] == logits[ids]).all()
    return ids.tolist()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (MinP(min_p=0.25), [0, 1, 2]),  # .125 is .25 * .5: inclusive
        (MinP(min_p=0.26), [0, 1]),
        (MinP(min_p=1.0), [0]),
        (MinP(min_p=1e-9), [0, 1, 2, 3, 4]),
        (TopA(top_a=0.5), [0, 1, 2]),  # .5 * .5^2 = .125
        (TopA(top_a=0.51), [0, 1]),
        (TopA(top_a=1.0), [0, 1]),
        (EpsilonCutoff(epsilon_cutoff=0.125), [0, 1, 2]),
        (EpsilonCutoff(epsilon_cutoff=0.0625), [0, 1, 2, 3, 4]),
        (EpsilonCutoff(epsilon_cutoff=0.6), [0]),  # none is as likely: the most likely one
        (EpsilonCutoff(epsilon_cutoff=1.0), [0]),
        (EtaCutoff(eta_cutoff=0.25), [0, 1]),  # .5 * exp(-1.29965) = .13632 < .25
        (EtaCutoff(eta_cutoff=0.2), [0, 1, 2]),  # .44721 * .27264 = .12193
        (EtaCutoff(eta_cutoff=0.01), [0, 1, 2, 3, 4]),  # .01 < .1 * .27264
        (EtaCutoff(eta_cutoff=1.0), [0]),  # exp(-1.29965) = .27264
        (PLess(), [0]),  # .3359375 is over .25
        (TypicalP(typical_p=0.25), [1]),  # deviations in bits: .875, .125, 1.125, 2.125, 2.125
        (TypicalP(typical_p=0.26), [0, 1]),
        (TypicalP(typical_p=0.75), [0, 1]),
        (TypicalP(typical_p=0.8), [0, 1, 2]),
        (TypicalP(typical_p=0.9), [0, 1, 2, 3]),  # a tie: the lower id
        (TypicalP(typical_p=1.0), [0, 1, 2, 3, 4]),
        (TopH(top_h=0.1), [0]),  # sums of -p log2 p: .5, 1, 1.375, 1.625, 1.875
        (TopH(top_h=0.5), [0]),
        (TopH(top_h=0.54), [0, 1]),
        (TopH(top_h=0.8), [0, 1, 2]),
        (TopH(top_h=1.0), [0, 1, 2, 3, 4]),
        (TailFree(tfs=0.4), [0]),  # curvatures .125, .0625, .0625: sums .5, .75, 1 of all
        (TailFree(tfs=0.5), [0, 1]),
        (TailFree(tfs=0.75), [0, 1, 2]),
        (TailFree(tfs=0.99), [0, 1, 2]),
        (TailFree(tfs=1.0), [0, 1, 2, 3, 4]),
    ],
    ids=repr,
)
def test_filters_by_hand(stage: Stage, expected: list[int]):
    """Each filter on (1/2, 1/4, 1/8, 1/16, 1/16)."""
    assert kept(stage, logs(*HALVES)) == expected


@pytest.mark.parametrize(
    "stage",
    [MinP(min_p=0.25), TopA(top_a=0.5), EpsilonCutoff(epsilon_cutoff=0.125), EtaCutoff(eta_cutoff=0.2)],
    ids=repr,
)
def test_masked_tokens_count_for_nothing(stage: Stage):
    """The same set with masked tokens between: probabilities are of what is left."""
    assert kept(stage, logs(0, 0.5, 0, 0.25, 0.125, 0.0625, 0, 0.0625)) == [1, 3, 4]


@pytest.mark.parametrize(
    ("stage", "num_kept"),
    [
        (MinP(min_p=1.0), 4),
        (TopA(top_a=1.0), 4),
        (TopNSigma(top_n_sigma=0.01), 4),  # no deviation
        (PLess(), 4),  # each is exactly sum p^2
        (EpsilonCutoff(epsilon_cutoff=0.25), 4),
        (EpsilonCutoff(epsilon_cutoff=0.3), 1),
        (EtaCutoff(eta_cutoff=0.25), 4),  # .5 * exp(-ln 4) = .125
        (TypicalP(typical_p=0.5), 2),
        (TopH(top_h=0.5), 2),
        (TailFree(tfs=0.5), 4),  # no curvature
    ],
    ids=repr,
)
def test_equal_logits(stage: Stage, num_kept: int):
    """Of equals all stay, or the lowest ids where a set has a size."""
    assert kept(stage, logs(0.25, 0.25, 0.25, 0.25)) == list(range(num_kept))


@pytest.mark.parametrize(("n", "expected"), [(0.5, [1]), (1.0, [1, 2]), (2.0, [1, 2, 3]), (9.0, [1, 2, 3, 4])])
def test_top_n_sigma_by_hand(n: float, expected: list[int]):
    """(4, 2, 0, -2) has deviation sqrt 5; a masked token has no part in it."""
    assert kept(TopNSigma(top_n_sigma=n), np.array([-INF, 4, 2, 0, -2], dtype=np.float32)) == expected


def test_top_n_sigma_ignores_the_temperature():
    """What is kept is the same at every temperature."""
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    sets = [kept(TopNSigma(top_n_sigma=2.0), (logits / t).astype(np.float32)) for t in (0.25, 1, 4)]
    assert sets[0] == sets[1] == sets[2]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [((0.4, 0.4, 0.2), [0, 1]), ((0.4, 0.3, 0.3), [0]), ((0.2, 0.2, 0.2, 0.2, 0.2), [0, 1, 2, 3, 4]), ((1.0,), [0])],
)
def test_p_less_by_hand(probabilities: tuple[float, ...], expected: list[int]):
    """Sums of squares: .36, .34, .2, 1."""
    assert kept(PLess(), logs(*probabilities)) == expected


def test_top_h_looks_at_a_hundred_tokens():
    """The 101st token is dropped even by h = 1."""
    assert kept(TopH(top_h=1.0), np.zeros(300, dtype=np.float32)) == list(range(100))


@pytest.mark.parametrize("probabilities", [(1.0,), (0.7, 0.3)])
def test_tail_free_needs_three_tokens(probabilities: tuple[float, ...]):
    """One or two tokens have no curvature."""
    assert kept(TailFree(tfs=0.1), logs(*probabilities)) == list(range(len(probabilities)))


@pytest.mark.parametrize(
    ("parameters", "divisor"),
    [
        ({"dynatemp_range": 0.5}, 1.3075188),  # .5 + 1 * 1.875 / log2 5
        ({"dynatemp_range": 0.5, "dynatemp_exponent": 2.0}, 1.1520866),
        ({"dynatemp_range": 0.5, "dynatemp_exponent": 0.0}, 1.5),
        ({"temperature": 0.5, "dynatemp_range": 1.0}, 1.2112782),  # lo is 0: 1.5 * .8075188
    ],
)
def test_dynamic_temperature_by_hand(parameters: dict, divisor: float):
    """Logits are distances to the largest over lo + (hi - lo) * share^e."""
    expected = -math.log(2) * np.array([0, 1, 2, 3, 3]) / divisor
    np.testing.assert_allclose(after(Temperature(**parameters), logs(*HALVES)), expected, rtol=1e-6, atol=1e-9)


def test_dynamic_temperature_at_the_ends():
    """Equal tokens get hi, a certain one lo, which may be 0: greedy."""
    stage = Temperature(temperature=1.0, dynatemp_range=1.0)
    assert after(stage, np.array([3, 3, 3, -INF], dtype=np.float32)).tolist() == [0, 0, 0, -INF]
    assert after(stage, np.array([0, 300], dtype=np.float32)).tolist() == [-INF, 300]
    assert after(stage, np.array([-INF, 5], dtype=np.float32)).tolist() == [-INF, 0]


def test_zero_temperature_is_greedy_whatever_the_range():
    """A range does not warm up a temperature of 0."""
    assert kept(Temperature(temperature=0.0, dynatemp_range=1.0), logs(*HALVES)) == [0]


def reference(stage: Stage, logits: np.ndarray) -> list[int]:
    """The definitions over fully sorted float64 probabilities."""
    ids = [i for i in np.argsort(-logits, kind="stable") if logits[i] > -INF]
    values = logits[ids].astype(np.float64)
    p = np.exp(values - values[0])
    p /= p.sum()
    entropy = -(p * np.log(p)).sum()
    (value,) = stage.model_dump().values()
    if isinstance(stage, TypicalP):
        deviation = np.abs(-np.log(p) - entropy).astype(np.float32)
        order = sorted(range(len(ids)), key=lambda i: (deviation[i], ids[i]))
        count = int(np.searchsorted(np.cumsum(p[order]), value - 1e-6)) + 1
        return sorted(ids[i] for i in order[:count])
    if isinstance(stage, TailFree):
        bends = np.abs(p[:-2] - 2 * p[1:-1] + p[2:])
        count = 1 + int((np.cumsum(bends) <= value * bends.sum() + 1e-6 * bends.sum()).sum())
        return sorted(ids[:count])
    bounds = {
        MinP: value * p[0],
        TopA: value * p[0] ** 2,
        PLess: (p**2).sum(),
        EpsilonCutoff: value,
        EtaCutoff: min(value, math.sqrt(value) * math.exp(-entropy)),
    }
    above = [i for i, one in zip(ids, p, strict=True) if one >= bounds[type(stage)] * (1 - 2e-6)]
    return sorted(above or ids[:1])


@pytest.mark.parametrize("cls", [MinP, TopA, PLess, EpsilonCutoff, EtaCutoff, TypicalP, TailFree])
@given(seed=st.integers(0, 10**6), exponent=st.floats(0, 9), spread=st.sampled_from([0.01, 1.0, 4.0]))
@settings(max_examples=15, deadline=None)
def test_filters_match_their_definitions(cls: type, seed: int, exponent: float, spread: float):
    """On long rows, from flat to peaked, with ties and masked tokens, each filter keeps what its definition says."""
    rng = np.random.default_rng(seed)
    logits = (spread * np.round(rng.standard_normal(6000), 3)).astype(np.float32)
    logits[rng.random(6000) < 0.1] = -INF
    field = next(iter(cls.model_fields))
    stage = cls() if cls is PLess else cls(**{field: 0.999 * 10**-exponent})
    got, wanted = set(kept(stage, logits)), set(reference(stage, logits))
    # float32 and float64 may disagree about a logit on the very bound, and so about every token that has it.
    assert len({float(logits[i]) for i in got ^ wanted}) <= 1 + len(wanted) // 1000, stage
