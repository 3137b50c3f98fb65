"""The compiled draw: the tokens that NumPy's draws, by the definition spelt out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from treadle_plugin_api import SamplingContext
from treadle_plugin_api.drawing import draw
from treadle_plugin_api.random import stage_key
from treadle_samplers.categorical import Categorical
from treadle_server import LanguageModel

LAST = 1 - 2.0**-53
BLOCK = 256  # what is summed at once


@pytest.fixture(scope="module")
def compiled(kernels):
    """The twin that the backend gives for NumPy's draw."""
    found = kernels.faster(draw)
    assert found is not draw
    return lambda logits, u: found(np.asarray(logits, np.float32), u, lambda: np.empty(len(logits), np.float32))


def by_definition(logits: np.ndarray, u: float) -> tuple[int, float]:
    """Return the first index whose running sum exceeds the share u of all, and its probability, in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    sums = np.cumsum(weights)
    index = min(int(np.searchsorted(sums, u * sums[-1], side="right")), int(np.searchsorted(sums, sums[-1])))
    return index, weights[index] / sums[-1]


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.floats(2.0**-53, LAST))
@example([18.0, 0.0], LAST)  # the rarest token, at the end of the row
@example([-40.0, 0.0, -35.5], LAST)
@example([60.0, 44.0, 43.5], LAST)
@example([-80.0], 0.5)
@settings(deadline=None)
def test_short_rows_by_the_definition(compiled, values, u):
    """Whatever the logits, and however far apart: the index and its probability."""
    index, probability = by_definition(np.array(values, np.float32), u)
    found = compiled(values, u)
    assert found[0] == index
    assert found[1] == pytest.approx(probability, rel=1e-5)


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 20_000, 49_152]),
    masked=st.sampled_from([0.0, 0.3, 0.999, 1.0]),
    shift=st.sampled_from([0.0, 25.0, -90.0, 3e4]),
    u=st.floats(2.0**-53, LAST),
)
@settings(deadline=None)
def test_long_rows_by_the_definition(compiled, seed, size, masked, shift, u):
    """At the ends of the blocks that are summed at once, whatever is masked, however large the logits are."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 3, size) + shift).astype(np.float32)
    logits[rng.random(size) < masked] = -np.inf
    logits[rng.integers(size)] = np.float32(1 + shift)
    index, probability = by_definition(logits, u)
    found = compiled(logits, u)
    assert found[0] == index
    assert found[1] == pytest.approx(probability, rel=1e-5)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 4000])
def test_only_what_is_there_is_read(compiled, size):
    """Logits behind a row, however large, are never drawn; nor are masked ones at either end of the uniforms."""
    wide = np.full(size + 32, 1e9, np.float32)
    wide[:size] = -np.inf
    wide[size // 2] = 3
    for u in (2.0**-53, 0.5, LAST):
        assert compiled(wide[:size], u) == (size // 2, 1.0)


def test_rows_of_any_kind_are_taken(compiled):
    """Rows that cannot be written to, and columns, whose numbers lie apart."""
    table = np.random.default_rng(0).standard_normal((700, 3)).astype(np.float32)
    table.flags.writeable = False
    assert compiled(table[:, 1], 0.3) == compiled(table[:, 1].copy(), 0.3)


@pytest.mark.parametrize("compile_it", [False, True])
def test_rows_without_anything_to_draw_are_refused(kernels, compile_it):
    """With either draw: nothing finite, something that is no number, no row, a row that is longer than any."""
    context = SamplingContext(vocab_size=5000)
    context.drawer = kernels.faster(draw) if compile_it else draw
    masked = np.full(1000, -np.inf, np.float32)
    for place, wrong in ((None, None), (700, np.nan), (700, np.inf), (0, np.nan)):
        row = masked.copy()
        if place is not None:
            row[:] = 0
            row[place] = wrong
        with pytest.raises(ValueError, match="nothing can be drawn"):
            context.draw(row)
    for row in (masked[:0], np.zeros((2, 9)), np.zeros(5001), np.float32(3)):
        with pytest.raises(ValueError, match=r"a draw needs a row of 1 to 5000 logits, but got the shape \("):
            context.draw(row)
    assert context.draw([-np.inf, 3.0]) == (1, 1.0)


def test_seeds_draw_what_they_draw_beside_numpy(kernels):
    """Rows of the engine's own path, by seed: the same tokens with either draw."""
    logits = np.random.default_rng(1).normal(0, 3, (64, 5000)).astype(np.float32)
    found = []
    for drawer in (draw, kernels.faster(draw)):
        contexts = [SamplingContext(vocab_size=5000, seed=seed) for seed in range(len(logits))]
        for context in contexts:
            context.enter(stage_key("categorical"))
            context.drawer = drawer
        found.append([Categorical().apply(row, context) for row, context in zip(logits, contexts, strict=True)])
    assert found[0] == found[1]
    assert len(set(found[0])) > 40


def test_a_served_model_draws_by_it(plugins, tiny_folder, monkeypatch):
    """Sampling a model on this backend goes through the compiled draw, also in the stages that draw by themselves."""
    from treadle_kernels import drawing

    calls, original = [], drawing.draw
    monkeypatch.setattr(drawing, "draw", lambda *args: calls.append(1) or original(*args))
    with LanguageModel.load(tiny_folder, backend="kernels", plugins=plugins) as model:
        for options in ({}, {"mirostat": 2}):
            calls.clear()
            model.generate("once", max_tokens=5, ignore_eos=True, seed=1, **options)
            assert len(calls) == 5
