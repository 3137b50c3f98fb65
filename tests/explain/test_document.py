"""Every matrix of the handworked document, in float64, through treadle's own operations and sampling chain."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from treadle_server import LanguageModel
from treadle_server.explain import document
from treadle_server.explain.arithmetic import DocumentSteps, HeadSteps, attend, concatenate, preview, project
from treadle_server.model.ops import softmax_forward
from treadle_server.plugins.manager import PluginManager

EXACT = {"rtol": 0, "atol": 1e-12}
CHAIN = {"rtol": 0, "atol": 1e-6}  # chains run on float32 logits
HEAD_MATRICES = ("q", "k", "v", "scores", "scaled", "weights", "output")


def numbers(value: Any) -> list[float]:
    """Return the numbers of nested lists and objects in order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value]


def test_the_golden_file_is_what_its_script_makes(golden: Path, golden_matrices: dict[str, Any]) -> None:
    """The script works the document out again, to the last digits that the file holds."""
    made = runpy.run_path(str(golden / "document" / "make_matrices.py"))["work_out"]()
    assert list(made) == list(golden_matrices)
    assert_allclose(numbers(made), numbers(golden_matrices), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["embedding", "positions", "x"])
def test_chapter_1_embedding_and_positions(name: str, steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """Word vectors, sinusoids with 100 under the second pair, and their sum."""
    assert_allclose(getattr(steps, name), golden_matrices[name], **EXACT)


def test_the_second_pair_of_dimensions_turns_by_a_hundredth(steps: DocumentSteps) -> None:
    """10000^(2/4) is 100, not the document's 10000^2."""
    assert_allclose(steps.positions[1, 2:], [np.sin(0.01), np.cos(0.01)], **EXACT)


@pytest.mark.parametrize("name", HEAD_MATRICES)
def test_chapters_2_to_5_one_head_without_a_mask(
    name: str, steps: DocumentSteps, golden_matrices: dict[str, Any]
) -> None:
    """Q, K, V, the scores raw and scaled, the softmax and the output of one head of 3."""
    assert_allclose(getattr(steps.head, name), golden_matrices["head"][name], **EXACT)


@pytest.mark.parametrize("name", HEAD_MATRICES)
@pytest.mark.parametrize("head", [0, 1])
def test_chapter_6_two_heads(head: int, name: str, steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """Every matrix of both heads of 2."""
    assert_allclose(getattr(steps.heads[head], name), golden_matrices["heads"][head][name], **EXACT)


def test_chapter_6_concatenation_and_projection(steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """The heads side by side, times W_o; and W_o on the outputs that the document assumes."""
    assert_allclose(steps.concatenated, golden_matrices["concatenated"], **EXACT)
    assert_allclose(steps.output, golden_matrices["output"], **EXACT)
    assumed = concatenate(*np.array(document.ASSUMED_OUTPUTS))
    assert_allclose(project(assumed, np.array(document.W_O)), golden_matrices["assumed_output"], **EXACT)


def test_chapter_7_probabilities(steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """Softmax of the given logits."""
    assert_allclose(steps.probabilities, golden_matrices["probabilities"], **EXACT)


@pytest.mark.parametrize("temperature", document.TEMPERATURES)
def test_chapter_8_temperature(temperature: float, steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """Logits over T, by the formula in float64 and by the sampling chain."""
    expected = golden_matrices["tempered"][str(temperature)]
    assert_allclose(steps.tempered[temperature], expected, **EXACT)
    sampled = preview(PluginManager.load().registry, steps.logits[0], temperature=temperature)
    assert_allclose(sampled.stages[-1].probabilities, expected, **CHAIN)


def test_chapter_9_top_k(steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """The three most likely words, renormalised."""
    assert_allclose(steps.top_k, golden_matrices["top_k"], **CHAIN)
    assert [document.VOCABULARY[i] for i in np.flatnonzero(steps.top_k)] == ["猫", "追", "我"]


def test_chapter_10_top_p(steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """The four words that reach 0.9 together, renormalised."""
    assert_allclose(steps.top_p, golden_matrices["top_p"], **CHAIN)
    assert [document.VOCABULARY[i] for i in np.flatnonzero(steps.top_p)] == ["<PAD>", "猫", "追", "我"]


def test_chapter_12_loss(steps: DocumentSteps, golden_matrices: dict[str, Any]) -> None:
    """Cross-entropy of each position with the word that follows, and their mean."""
    assert_allclose(steps.losses, golden_matrices["losses"], **EXACT)
    assert steps.loss == pytest.approx(golden_matrices["loss"], abs=1e-12)


# ---- the decoder is the document's attention with a mask ------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(cat_mouse: LanguageModel) -> Any:
    """The bundled model's pass over the document's sentence, in float64 on weights that are stored as float32."""
    return cat_mouse.trace(list(document.SENTENCE_IDS))


STORED = {"rtol": 0, "atol": 1e-6}  # weights such as 0.1 are not exact in float32


def test_the_decoder_embeds_as_the_document_does(trace: Any, golden_matrices: dict[str, Any]) -> None:
    """The bundled model's input is the document's X_input."""
    assert_allclose(trace["embedding"], golden_matrices["embedding"], **STORED)
    assert_allclose(trace["positions"], golden_matrices["positions"], **STORED)
    assert_allclose(trace["embedding_with_positions"], golden_matrices["x"], **STORED)


@pytest.mark.parametrize("head", [0, 1])
def test_the_decoder_attends_as_the_document_does_but_for_the_future(
    head: int, trace: Any, golden_matrices: dict[str, Any]
) -> None:
    """Before the mask everything is equal; behind it the last word, which sees all others, is."""
    expected = golden_matrices["heads"][head]
    layer = "layers.0.attention."
    for name, key in (("q", "q"), ("k", "k"), ("v", "v"), ("scores", "scores"), ("scaled_scores", "scaled")):
        assert_allclose(trace[layer + name][head], expected[key], rtol=0, atol=5e-6)
    assert_allclose(trace[f"{layer}weights"][head][-1], expected["weights"][-1], **STORED)
    assert_allclose(trace[f"{layer}heads"][-1, 2 * head : 2 * head + 2], expected["output"][-1], rtol=0, atol=5e-6)
    causal = softmax_forward(np.where(np.tri(3, dtype=bool), np.array(expected["scaled"]), -np.inf))
    assert_allclose(trace[f"{layer}weights"][head], causal, **STORED)


def test_the_decoder_projects_as_the_document_does(trace: Any, golden_matrices: dict[str, Any]) -> None:
    """The last word's output of both heads through W_o."""
    assert_allclose(trace["layers.0.attention.projection"][-1], golden_matrices["output"][-1], rtol=0, atol=1e-5)


# ---- the five exercises at the document's end -----------------------------------------------------------------------


def test_exercise_1_a_query() -> None:
    """The query is [2, 0]."""
    x, w_q = np.array([[1.0, 0, 1, 0]]), np.array([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    assert project(x, w_q).tolist() == [[2, 0]]


def test_exercise_2_attention_weights() -> None:
    """Scores 3 and 1 give the shares 0.881 and 0.119."""
    assert_allclose(softmax_forward(np.array([3.0, 1.0])), [0.881, 0.119], atol=5e-4)


def test_exercise_3_concatenation() -> None:
    """Two heads of [2, 3] make [2, 6]."""
    heads: list[HeadSteps] = [attend(np.ones((2, 4)), document.SINGLE_HEAD) for _ in range(2)]
    assert concatenate(*(head.output for head in heads)).shape == (2, 6)


def test_exercise_4_a_temperature_under_1_widens_the_gap() -> None:
    """At 0.5 the probabilities of logits 2 and -1 lie further apart than at 1."""
    registry = PluginManager.load().registry
    wide, narrow = (
        preview(registry, np.array([2.0, -1.0]), temperature=t).stages[-1].probabilities for t in (0.5, 1.0)
    )
    assert wide[0] - wide[1] > narrow[0] - narrow[1]


def test_exercise_5_a_nucleus_of_four_fifths() -> None:
    """Of 0.50, 0.25, 0.15 and 0.10, top-p 0.8 keeps the first three."""
    logits = np.log([0.50, 0.25, 0.15, 0.10])
    assert preview(PluginManager.load().registry, logits, top_p=0.8).stages[0].kept.tolist() == [0, 1, 2]
