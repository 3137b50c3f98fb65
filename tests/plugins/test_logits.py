"""The primitives that all stages share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_plugin_api import finite, keep, softmax64, top_ids

INF = np.inf


def row(*values: float) -> np.ndarray:
    """Logits [vocab] float32."""
    return np.array(values, dtype=np.float32)


def reference_top(logits: np.ndarray, k: int) -> list[int]:
    """The contract in one line: sort by (logit descending, id ascending), without masked tokens."""
    return [i for i in sorted(range(len(logits)), key=lambda i: (-logits[i], i)) if logits[i] > -INF][:k]


few_values = st.sampled_from([-INF, -2.0, 0.0, 0.5, 1.0, 1e30])


@given(st.lists(few_values, min_size=1, max_size=40), st.integers(0, 45))
def test_top_ids_follow_the_order(values: list[float], k: int):
    """Largest first, lowest id first among equals, masked ones never, fewer if fewer are left."""
    assert top_ids(row(*values), k).tolist() == reference_top(row(*values), k)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 40, 300, 5000, 19_999, 30_000]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_top_ids_on_long_rows(seed: int, k: int, coarse: bool):
    """The bound from column maxima loses nothing, with many ties and masked tokens too."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(20_001).astype(np.float32)
    if coarse:
        logits = np.round(logits)
        logits[rng.random(len(logits)) < 0.4] = -INF
    expected = reference_top(logits, k)
    assert top_ids(logits, k).tolist() == expected
    assert top_ids(logits, k, ordered=False).tolist() == sorted(expected)


def test_top_ids_of_equal_logits():
    """On a long row of equal logits the lowest ids win."""
    assert top_ids(np.zeros(50_000, dtype=np.float32), 3).tolist() == [0, 1, 2]


def test_finite_is_ascending():
    """The ids that are not masked, in order."""
    assert finite(row(0, -INF, 2, -INF)).tolist() == [0, 2]


def test_softmax64_ignores_masked():
    """Probabilities are float64, sum to 1, and are exactly 0 for masked tokens, whatever the size of the logits."""
    probabilities = softmax64(row(1e30, -INF, 1e30, -1e30))
    assert probabilities.dtype == np.float64
    assert probabilities.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_keep_masks_the_rest():
    """Kept ids keep their logit in the given buffer."""
    out = np.zeros(4, dtype=np.float32)
    assert keep(row(1, 2, 3, 4), np.array([2, 0]), out) is out
    assert out.tolist() == [1, -INF, 3, -INF]


@pytest.mark.parametrize("size", [1, 2, 8191, 8192, 8193])
def test_sizes_around_the_fold(size: int):
    """No vocabulary size is special."""
    logits = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    assert top_ids(logits, 7).tolist() == reference_top(logits, 7)
