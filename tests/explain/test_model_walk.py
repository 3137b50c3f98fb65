"""The walk through a model says what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from treadle_server import LanguageModel
from treadle_server.errors import InvalidRequestError
from treadle_server.explain.blocks import Block, Distribution, Heatmap, Matrix, Part, Table, Text
from treadle_server.explain.model_walk import MAX_TOKENS, ModelWalk, View

KNOBS: Mapping[str, object] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[LanguageModel]:
    """A tiny model with several layers and heads, some of which share keys."""
    with LanguageModel.load(tiny_folder) as loaded:
        yield loaded


def blocks(part: Part) -> Iterator[Block]:
    """Every block of a part, in order."""
    for chapter in part.chapters:
        yield from chapter.blocks


def matrices(part: Part, name: str) -> list[Matrix]:
    """The matrices of a name."""
    return [block for block in blocks(part) if isinstance(block, Matrix) and block.name == name]


def test_the_chosen_layer_and_head_are_shown(model: LanguageModel) -> None:
    """The heatmap and Q of the walk are those of the trace; a shared key head is the query head's own."""
    attention = model.config.attention
    layer, head = model.config.num_layers - 1, attention.num_heads - 1
    part = ModelWalk(model, View(prompt="the cat", layer=layer, head=head, knobs=KNOBS)).part()
    trace = model.trace("the cat", layers=[layer])
    (heatmap,) = (block for block in blocks(part) if isinstance(block, Heatmap))
    assert_allclose(heatmap.values, trace[f"layers.{layer}.attention.weights"][head])
    assert_allclose(matrices(part, "Q")[0].values, trace[f"layers.{layer}.attention.q"][head])
    assert_allclose(matrices(part, "K")[0].values, trace[f"layers.{layer}.attention.k"][head // attention.group_size])


@pytest.mark.parametrize(
    "family",
    [
        "bloom",
        "gemma3_scaled",
        "gpt2",
        "granite",
        "llama_plain",
        "mistral_sw8",
        "olmo2",
        "opt_projected",
        "qwen2_moe",
        "qwen3",
    ],
)
def test_every_intermediate_of_the_layer_is_told(golden: Path, family: str) -> None:
    """Each array of the trace is a matrix or a heatmap of the walk, whatever the family computes."""
    ids = [5, 9, 3, 7]
    with LanguageModel.load(golden / "models" / family) as model:
        layer, heads = model.config.num_layers - 1, model.config.attention.num_heads
        part = ModelWalk(model, View(prompt=ids, layer=layer, head=heads - 1, knobs=KNOBS)).part()
        trace = model.trace(ids, layers=[layer])
    shown = [block.values for block in blocks(part) if isinstance(block, Matrix | Heatmap)]
    for name, array in trace.items():
        wanted = array[-1] if array.ndim == 3 else array[:, : model.vocab_size] if name == "logits" else array
        assert any(wanted.shape == values.shape and np.array_equal(wanted, values) for values in shown), name


def test_the_choice_is_the_preview(model: LanguageModel) -> None:
    """The bars after each stage are the preview's, in the order of the model's own probabilities."""
    part = ModelWalk(model, View(prompt="the cat", knobs=KNOBS, seed=3)).part()
    preview = model.preview("the cat", seed=3, **KNOBS)
    bars = [block for block in blocks(part) if isinstance(block, Distribution)]
    assert [bar.name for bar in bars] == ["the model's own", *(f"after {s}" for s in _settings())]
    order = np.argsort(-preview.initial.probabilities, kind="stable")[:10]
    for block, stage in zip(bars, (preview.initial, *preview.stages[:-1]), strict=True):
        assert_allclose([bar.probability for bar in block.bars], stage.probabilities[order])


def _settings() -> list[str]:
    return ["temperature = 0.7", "top-k = 5", "top-p = 0.9"]


def test_the_loss_is_the_score(model: LanguageModel) -> None:
    """The losses of the walk are minus the log-probabilities that `score` gives."""
    text = "the cat sat on the mat"
    part = ModelWalk(model, View(prompt=text, knobs=KNOBS)).part()
    table = next(block for block in part.chapters[-1].blocks if isinstance(block, Table))
    scored = [-one.logprob for one in model.score(text)[1:] if one.logprob is not None]
    assert_allclose([float(row[-1]) for row in table.rows], scored, rtol=0, atol=6e-4)


def test_a_single_token_has_no_loss(model: LanguageModel) -> None:
    """With nothing to guess inside the text the walk ends with the choice."""
    part = ModelWalk(model, View(prompt="", knobs=KNOBS)).part()
    assert part.chapters[-1].title == "Choosing the next token"


def test_cat_mouse_shows_both_heads_and_its_sentence(cat_mouse: LanguageModel) -> None:
    """A model of two heads shows both; after 猫 追 it expects 老鼠."""
    part = ModelWalk(cat_mouse, View(prompt="猫 追", knobs=KNOBS)).part()
    assert len([block for block in blocks(part) if isinstance(block, Heatmap)]) == 2
    first = next(block for block in blocks(part) if isinstance(block, Distribution))
    assert first.bars[0].label == "老鼠"
    assert any(isinstance(block, Text) and "looks most at" in block.text for block in blocks(part))


@pytest.mark.parametrize(
    ("view", "field", "message"),
    [
        (View(prompt="the", layer=99, knobs=KNOBS), "layer", "must be in [0, "),
        (View(prompt="the", layer=-1, knobs=KNOBS), "layer", "must be in [0, "),
        (View(prompt="the", head=99, knobs=KNOBS), "head", "must be in [0, "),
        (View(prompt="the", knobs={"temperature": -1}), "temperature", "at least 0"),
        (View(prompt="the", seed=-1, knobs=KNOBS), "seed", "-1"),
        (View(prompt="cat " * 400, knobs=KNOBS), "prompt", "tokens"),
    ],
)
def test_wrong_requests_are_refused_by_name(model: LanguageModel, view: View, field: str, message: str) -> None:
    """An unknown layer or head, a wrong knob and a long prompt name field, range and value."""
    with pytest.raises(InvalidRequestError) as refusal:
        ModelWalk(model, view).part()
    assert any(v.field == field and message in v.message for v in refusal.value.violations)


def test_a_prompt_that_nobody_could_read_is_refused(cat_mouse: LanguageModel) -> None:
    """The limit of a walk's tokens is below a trace's."""
    assert cat_mouse.request_limits.max_trace_tokens > MAX_TOKENS


def test_parts_of_characters_are_shown_as_bytes(model: LanguageModel) -> None:
    """A token that holds half a character has a label all the same."""
    part = ModelWalk(model, View(prompt="猫", knobs=KNOBS)).part()
    table = next(block for block in blocks(part) if isinstance(block, Table))
    assert any(row[-1].startswith("<E7") for row in table.rows)


def test_a_greedy_choice_is_not_called_random(model: LanguageModel) -> None:
    """At temperature 0 the most likely token is taken."""
    part = ModelWalk(model, View(prompt="the cat", knobs={"temperature": 0})).part()
    texts = [block.text for block in blocks(part) if isinstance(block, Text)]
    assert any("The most likely one is taken" in text for text in texts)
    assert not any("random" in text for text in texts)
