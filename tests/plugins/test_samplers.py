"""The built-in stages: hand values, edges, and the distributions they draw from."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from treadle_plugin_api import SamplingContext, Stage, random, softmax64
from treadle_plugin_api.testing import check_stage
from treadle_samplers import Categorical, Greedy, MinTokens, Temperature, TopK, TopP

INF = np.inf
finite_floats = st.floats(-50, 50, width=32)


def row(*values: float) -> np.ndarray:
    """Logits [vocab] float32."""
    return np.array(values, dtype=np.float32)


def logs(*probabilities: float) -> np.ndarray:
    """Logits [vocab] float32 of a distribution."""
    return np.log(np.array(probabilities)).astype(np.float32)


def after(stage: Stage, logits: np.ndarray, **context: object) -> np.ndarray:
    """The row after the stage."""
    return stage.apply(logits, SamplingContext(vocab_size=len(logits), **context))


def kept(stage: Stage, logits: np.ndarray) -> list[int]:
    """Ids that the stage keeps."""
    return np.flatnonzero(after(stage, logits) > -INF).tolist()


@pytest.mark.parametrize(
    ("cls", "parameters"),
    [
        (Greedy, {}),
        (Categorical, {}),
        *((Temperature, {"temperature": value}) for value in (0, 1e-6, 1e-5, 0.7, 1.0, 40, 1e300)),
        *((TopK, {"top_k": value}) for value in (1, 2, 40, 256, 257, 2**31 - 1)),
        *((TopP, {"top_p": value}) for value in (1e-9, 1e-6, 0.3, 0.95, 0.9999999, 1.0)),
        *((MinTokens, {"min_tokens": value}) for value in (1, 4, 5, 100)),
    ],
)
def test_conforms(cls: type, parameters: dict):
    """Every built-in stage passes the suite that authors use."""
    check_stage(cls, **parameters)


def test_greedy_takes_the_lowest_of_equals():
    """Ties go to the lowest id."""
    assert Greedy().apply(row(1, 3, 3, 2), SamplingContext(vocab_size=4)) == 1


def test_greedy_distribution_is_one_hot():
    """Only the chosen token has a finite logit."""
    assert Greedy().distribution(row(1, 3, 3), SamplingContext(vocab_size=3)).tolist() == [-INF, 3, -INF]


def test_temperature_by_hand():
    """(l - max) / T."""
    assert after(Temperature(temperature=0.5), row(3, 2, 1, -INF)).tolist() == [0, -2, -4, -INF]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 9.9e-6])
def test_temperature_towards_zero_is_greedy(temperature: float):
    """Under 1e-5 the largest alone stays, the lowest id among equals."""
    assert kept(Temperature(temperature=temperature), row(1, 5, 5)) == [1]


def test_temperature_never_overflows():
    """The smallest legal divisor on the largest logits gives neither NaN nor +inf."""
    assert after(Temperature(temperature=1e-5), row(3e38, -3e38, 0)).tolist() == [0, -INF, -INF]


def test_top_k_keeps_exactly_k():
    """Of the tied the lowest ids stay."""
    assert kept(TopK(top_k=2), row(1, 2, 1, 1)) == [0, 1]
    assert kept(TopK(top_k=3), row(0, 0, 0, 0, 0)) == [0, 1, 2]


def test_top_k_past_the_vocabulary_keeps_all():
    """K > V, or more than are left, keeps what is there."""
    assert kept(TopK(top_k=9), row(1, 2)) == [0, 1]
    assert kept(TopK(top_k=3), row(1, -INF, 2, -INF)) == [0, 2]


@pytest.mark.parametrize(
    ("probabilities", "p", "expected"),
    [
        ((0.3, 0.1, 0.1, 0.5), 0.8, [0, 3]),  # a decimal boundary that floating point just misses
        ((0.5, 0.3, 0.15, 0.05), 0.6, [0, 1]),  # the crossing token stays
        ((0.4, 0.3, 0.2, 0.1), 0.8, [0, 1, 2]),
        ((0.4, 0.3, 0.2, 0.1), 0.7, [0, 1]),
        ((0.4, 0.3, 0.2, 0.1), 1e-9, [0]),
        ((0.25, 0.25, 0.25, 0.25), 0.5, [0, 1]),  # ties: lowest ids
        ((0.4, 0.3, 0.2, 0.1), 1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_by_hand(probabilities: tuple[float, ...], p: float, expected: list[int]):
    """The smallest set with mass >= p, within the slack."""
    assert kept(TopP(top_p=p), logs(*probabilities)) == expected


def test_top_p_one_keeps_the_unlikeliest():
    """P = 1 is no filter, even for tokens far under the slack."""
    assert kept(TopP(top_p=1.0), row(0, -80)) == [0, 1]


def test_order_of_temperature_and_top_p_shows():
    """L = [3, 2, 1], T = 0.5, p = 0.8: temperature first keeps one token, last keeps two."""
    logits, cold, nucleus = row(3, 2, 1), Temperature(temperature=0.5), TopP(top_p=0.8)
    assert kept(nucleus, after(cold, logits)) == [0]
    assert kept(cold, after(nucleus, logits)) == [0, 1]


def reference_nucleus(logits: np.ndarray, p: float) -> list[int]:
    """The definition, by a full sort."""
    order = sorted((i for i in range(len(logits)) if logits[i] > -INF), key=lambda i: (-logits[i], i))
    sums = np.cumsum(softmax64(logits)[order])
    return sorted(order[: int(np.searchsorted(sums, p - 1e-6)) + 1])


@given(st.integers(0, 10**6), st.floats(0.01, 0.999), st.sampled_from([0.0, 0.01, 1.0, 4.0]))
@settings(max_examples=40, deadline=None)
def test_top_p_on_long_rows(seed: int, p: float, spread: float):
    """Selection by partition finds the nucleus that a sort finds, from peaked rows to flat ones."""
    rng = np.random.default_rng(seed)
    logits = (spread * np.round(rng.standard_normal(5000), 2)).astype(np.float32)
    logits[rng.random(5000) < 0.1] = -INF
    assert kept(TopP(top_p=p), logits) == reference_nucleus(logits, p)


@pytest.mark.parametrize("p", [1e-7, 0.5, 0.999])
def test_top_p_on_a_flat_vocabulary(p: float):
    """Thousands of equal tokens: as many as needed, the lowest ids."""
    expected = max(1, int(np.ceil((p - 1e-6) * 5000)))
    assert kept(TopP(top_p=p), np.zeros(5000, dtype=np.float32)) == list(range(expected))


def test_min_tokens_masks_every_end():
    """All eos ids and all stop ids are masked until enough tokens are out; the prompt does not count."""
    stage, ends = MinTokens(min_tokens=2), {"eos_ids": [0, 3], "stop_ids": [2, 99]}
    assert after(stage, row(1, 1, 1, 1), prompt_ids=[1] * 9, output_ids=[1], **ends).tolist() == [-INF, 1, -INF, -INF]
    assert after(stage, row(1, 1, 1, 1), output_ids=[1, 1], **ends).tolist() == [1, 1, 1, 1]


def test_min_tokens_leaves_ends_if_nothing_else_is_left():
    """A token has to be chosen: where a mask left only ends, one may come early."""
    assert after(MinTokens(min_tokens=2), row(1, -INF), eos_ids=[0]).tolist() == [1, -INF]


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (Temperature, "temperature", [-0.1, float("nan"), float("inf"), True, "1", None]),
        (TopK, "top_k", [0, -1, 2**31, 3.0, True, "3", None]),
        (TopP, "top_p", [0.0, -0.1, 1.0001, float("nan"), float("-inf"), True, "0.5"]),
        (MinTokens, "min_tokens", [0, -1, 1.0, True, 2**31]),
    ],
)
def test_parameters_out_of_range(cls: type, name: str, values: list):
    """Out of range or of another type: refused by the stage itself."""
    for value in values:
        with pytest.raises(ValidationError):
            cls(**{name: value})


def draws(logits: np.ndarray, count: int, seed: int = 5) -> np.ndarray:
    """Tokens drawn at `count` positions, counted by id."""
    context = SamplingContext(vocab_size=len(logits), seed=seed)
    stage, key = Categorical(), random.stage_key("categorical")
    counts = np.zeros(len(logits), dtype=int)
    for _ in range(count):
        context.enter(key)
        counts[stage.apply(logits, context)] += 1
        context.append(0)
    return counts


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic over the possible tokens; impossible ones must not occur."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 20_000), (2, 20_000), pytest.param(3, 100_000, marks=pytest.mark.soak)]
)
def test_categorical_draws_from_softmax(seed: int, count: int):
    """Draws agree with the exact distribution (chi-square, 9 degrees of freedom, p > 1e-4)."""
    logits = row(2, 1, 0, -INF, 1.5, -1, 0.5, 0.1, 2.5, 1.2, 0.7)
    assert chi_square(draws(logits, count, seed), softmax64(logits)) < 33.7


def test_categorical_draws_from_long_rows():
    """20,000 draws over three blocks, counted in 20 bins (19 degrees of freedom, p > 1e-4)."""
    logits = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    counts, probabilities = draws(logits, 20_000), softmax64(logits)
    assert chi_square(counts.reshape(20, -1).sum(axis=1), probabilities.reshape(20, -1).sum(axis=1)) < 49.0


class At(SamplingContext):
    """A context whose uniform is given."""

    def __init__(self, vocab_size: int, u: float) -> None:
        super().__init__(vocab_size=vocab_size)
        self.u = u

    def uniform(self, size=None):
        """The given number."""
        return self.u


@pytest.mark.parametrize(("u", "expected"), [(2.0**-53, 1), (0.4, 1), (0.5, 3), (0.6, 3), (1 - 2.0**-53, 3)])
def test_categorical_is_the_inverse_cdf(u: float, expected: int):
    """The first token whose running sum exceeds u, in ascending id order; at neither end a masked one."""
    assert Categorical().apply(row(-INF, 2, -INF, 2, -INF), At(5, u)) == expected


@given(st.lists(finite_floats, min_size=1, max_size=30), st.floats(2.0**-53, 1 - 2.0**-53))
@example([18.0, 0.0], 1 - 2.0**-53)  # the rarest token, at the end of the row
@example([-40.0, 0.0, -35.5], 1 - 2.0**-53)
@example([60.0, 44.0, 43.5], 1 - 2.0**-53)
def test_categorical_matches_a_running_sum(values: list[float], u: float):
    """The definition, spelt out."""
    sums = np.cumsum(np.exp(np.array(values) - max(values)))
    expected = min(int(np.searchsorted(sums, u * sums[-1], side="right")), len(values) - 1)
    assert Categorical().apply(row(*values), At(len(values), u)) == expected


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([511, 512, 513, 1024, 20_000]),
    masked=st.sampled_from([0.0, 0.3, 0.7, 0.999]),
    u=st.floats(2.0**-53, 1 - 2.0**-53),
)
@settings(deadline=None)
def test_categorical_matches_a_running_sum_on_long_rows(seed: int, size: int, masked: float, u: float):
    """The definition holds at the ends of the blocks that are summed at once, whatever is masked."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, size).astype(np.float32)
    logits[rng.random(size) < masked] = -INF
    logits[rng.integers(size)] = 1
    sums = np.cumsum(np.exp(logits.astype(np.float64)))
    expected = min(np.searchsorted(sums, u * sums[-1], side="right"), np.searchsorted(sums, sums[-1]))
    assert Categorical().apply(logits, At(size, u)) == expected
