"""A preview shows the distribution after every stage of the chain that a generation would run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from treadle_plugin_api import Select, Stage
from treadle_server import LanguageModel
from treadle_server.engine.chain import StageSpec
from treadle_server.errors import InvalidRequestError, StageError
from treadle_server.language_model import PreviewSpec, SamplingPreview, preview_logits
from treadle_server.plugins.manager import PluginManager
from treadle_server.plugins.registry import StageEntry, StageRegistry

LOGITS = (0.1, -0.5, 2.3, 1.2, 0.8, -0.3)  # the handworked document's, for 6 words
INF = float("inf")


def preview(registry: StageRegistry | None = None, **fields: object) -> SamplingPreview:
    """Preview the document's logits, or others, without a model."""
    spec = PreviewSpec(**{"logits": LOGITS, "seed": 0} | fields)
    return preview_logits(spec, registry or PluginManager.load().registry)


def softmax(logits: list[float]) -> list[float]:
    """Softmax in plain Python, for hand values."""
    weights = [math.exp(value) for value in logits]
    return [weight / sum(weights) for weight in weights]


def names(result: SamplingPreview) -> list[str]:
    """Names of the stages."""
    return [stage.stage for stage in result.stages]


def test_temperature_top_k_and_top_p_by_hand() -> None:
    """Each stage's distribution is the formula's on the document's logits."""
    result = preview(knobs={"temperature": 0.7, "top_k": 3, "top_p": 0.9})
    assert names(result) == ["temperature", "top_k", "top_p", "categorical"]
    np.testing.assert_allclose(result.initial.probabilities, softmax(list(LOGITS)), atol=1e-6)
    warm = softmax([value / 0.7 for value in LOGITS])
    np.testing.assert_allclose(result.stages[0].probabilities, warm, atol=1e-6)
    three = [p if i in (2, 3, 4) else 0 for i, p in enumerate(warm)]
    np.testing.assert_allclose(result.stages[1].probabilities, [p / sum(three) for p in three], atol=1e-6)
    assert [stage.kept.tolist() for stage in result.stages] == [[0, 1, 2, 3, 4, 5], [2, 3, 4], [2, 3], [2, 3]]
    two = [p if i in (2, 3) else 0 for i, p in enumerate(warm)]
    np.testing.assert_allclose(result.stages[3].probabilities, [p / sum(two) for p in two], atol=1e-6)
    assert result.stages[0].parameters["temperature"] == 0.7
    assert result.knobs["top_p"] == 0.9


def test_every_distribution_sums_to_one() -> None:
    """Also with masked logits, which stay at zero."""
    result = preview(logits=[1.0, -INF, 0.5, -INF], knobs={"temperature": 2.0})
    for stage in (result.initial, *result.stages):
        assert stage.probabilities.shape == (4,)
        assert math.isclose(stage.probabilities.sum(), 1, abs_tol=1e-12)
        assert stage.kept.tolist() == [0, 2]


def test_nothing_given_is_the_bare_distribution() -> None:
    """Only the select runs, on the logits as they are."""
    result = preview()
    assert names(result) == ["categorical"]
    np.testing.assert_array_equal(result.stages[0].probabilities, result.initial.probabilities)


def test_greedy_is_one_hot() -> None:
    """Temperature 0 ends in all mass on the largest logit."""
    result = preview(knobs={"temperature": 0})
    assert names(result)[-1] == "greedy"
    assert result.stages[-1].probabilities.tolist() == [0, 0, 1, 0, 0, 0]
    assert result.chosen == 2


def test_order_is_kept() -> None:
    """top_p before the temperature keeps other tokens than after it."""
    knobs = {"temperature": 3.0, "top_p": 0.9}
    first = preview(knobs=knobs, order=["top_p", "temperature"])
    assert names(first) == ["top_p", "temperature", "categorical"]
    assert first.stages[1].kept.tolist() == [0, 2, 3, 4]
    assert preview(knobs=knobs).stages[1].kept.tolist() == [0, 1, 2, 3, 4, 5]


def test_preset_is_given() -> None:
    """A named preset acts, and what is said beside it wins."""
    result = preview(preset="creative", knobs={"top_k": 2})
    assert (result.knobs["top_k"], result.knobs["top_p"]) == (2, 0.95)


def test_seed_chooses_and_is_returned() -> None:
    """The same seed chooses the same token; many seeds follow the distribution; an unset one is drawn and returned."""
    drawn = preview(seed=None)
    assert preview(seed=drawn.seed).chosen == drawn.chosen
    registry = PluginManager.load().registry
    chosen = np.bincount([preview(registry, seed=seed).chosen for seed in range(400)], minlength=6)
    np.testing.assert_allclose(chosen / 400, softmax(list(LOGITS)), atol=0.08)


def test_ends_are_masked_as_long_as_outputs_are_few() -> None:
    """min_tokens counts the output, not the prompt, and masks the end and stop tokens given."""
    few = preview(knobs={"min_tokens": 2}, prompt_ids=[1, 1, 1], output_ids=[0], eos_ids=[2], stop_token_ids=[3])
    assert few.stages[0].kept.tolist() == [0, 1, 4, 5]
    enough = preview(knobs={"min_tokens": 2}, output_ids=[0, 0], eos_ids=[2])
    assert enough.stages[0].kept.tolist() == [0, 1, 2, 3, 4, 5]


class Echo(Stage):
    """Make the tokens that were accepted the only ones."""

    name = "echo"
    kind = "mask"

    def start(self, context):
        """Keep what is accepted."""
        return []

    def accept(self, state, token_id):
        """Keep the token."""
        state.append(token_id)

    def apply(self, logits, context, state=None):
        """Mask all but the prompt and what was accepted."""
        out = np.full_like(logits, -np.inf)
        kept = [*state, *context.prompt_ids.tolist()]
        out[kept] = logits[kept]
        return out


class Broken(Stage):
    """Return nonsense."""

    name = "broken"
    kind = "mask"

    def apply(self, logits, context, state=None):
        """Return a text."""
        return "no array"


class Last(Select):
    """Take the last token that can be taken."""

    name = "last"

    def apply(self, logits, context, state=None):
        """Return the largest id that is not masked."""
        return int(np.flatnonzero(logits > -np.inf)[-1])


@pytest.fixture(scope="module")
def registry() -> StageRegistry:
    """The built-in stages and those above."""
    foreign = [StageEntry(cls=cls, plugin="mine", distribution="mine", version="1") for cls in (Echo, Broken, Last)]
    return StageRegistry([*PluginManager.load().registry.entries(), *foreign])


def test_stages_see_prompt_and_output(registry: StageRegistry) -> None:
    """A stage's state has accepted the output ids, and its context has the prompt ids."""
    result = preview(registry, stages=[StageSpec("echo"), StageSpec("last")], prompt_ids=[1], output_ids=[3, 4])
    assert names(result) == ["echo", "last"]
    assert result.stages[0].kept.tolist() == [1, 3, 4]
    assert result.chosen == 4


def test_a_broken_stage_is_named(registry: StageRegistry) -> None:
    """What a foreign stage does wrong is its error, not the preview's."""
    with pytest.raises(StageError, match="'broken' of plugin 'mine'"):
        preview(registry, stages=[StageSpec("broken")])


WRONG = [
    ({"logits": []}, "logits", "at least one"),
    ({"logits": [[1.0]]}, "logits", "shape [1, 1]"),
    ({"logits": [[1.0], [1.0, 2.0]]}, "logits", "must be a list of numbers"),
    ({"logits": ["a"]}, "logits", "must be a list of numbers"),
    ({"logits": [True]}, "logits", "bool"),
    ({"logits": [1.0, float("nan")]}, "logits[1]", "nan"),
    ({"logits": [1.0, INF]}, "logits[1]", "inf"),
    ({"logits": [1.0, 1e39]}, "logits[1]", "1e+39"),
    ({"logits": [-1e39, 1.0]}, "logits[0]", "-1e+39"),
    ({"logits": [-INF, -INF]}, "logits", "only masked tokens"),
    ({"prompt": "a"}, "prompt", "one of the two"),
    ({"prompt_ids": [6]}, "prompt_ids[0]", "token id 6 is outside the vocabulary [0, 6)"),
    ({"output_ids": [0, -1]}, "output_ids[1]", "-1"),
    ({"output_ids": [0] * (1 << 17)}, "prompt_ids", "has 131072 tokens"),
    ({"eos_ids": [True]}, "eos_ids[0]", "must be an integer, got True"),
    ({"stop_token_ids": [9]}, "stop_token_ids[0]", "token id 9"),
    ({"seed": -1}, "seed", "got -1"),
    ({"preset": "nope"}, "preset", "creative"),
    ({"knobs": {"temperature": -1.0}}, "temperature", "-1"),
    ({"knobs": {"nope": 1}}, "nope", "is no sampling knob"),
    ({"order": ["nope"]}, "order[0]", "there is no stage 'nope'"),
    ({"knobs": {"top_k": 3}, "order": ["temperature"]}, "order", "leaves out 'top_k'"),
]


@pytest.mark.parametrize(("fields", "field", "message"), WRONG, ids=[f"{f}-{m[:20]}" for _, f, m in WRONG])
def test_wrong_requests_name_the_field(fields: dict[str, object], field: str, message: str) -> None:
    """The refusal names field, value and range."""
    with pytest.raises(InvalidRequestError) as caught:
        preview(**fields)
    assert any(v.field == field and message in v.message for v in caught.value.violations)


def test_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions that are too large together are refused with size and limit."""
    monkeypatch.setattr("treadle_server.language_model.preview.MAX_PREVIEW_BYTES", 150)
    with pytest.raises(InvalidRequestError, match=r"stages: make distributions of 192 bytes or more .* at most 150"):
        preview(knobs={"temperature": 0.5})
    assert preview(logits=[1.0, 2.0, 3.0]).stages


def test_a_prompt_is_previewed_as_it_is_generated(model: LanguageModel) -> None:
    """The distribution is that of the model's logits, and the seed chooses what generation chooses."""
    knobs = {"temperature": 0.9, "top_k": 20, "seed": 5}
    result = model.preview([1, 5, 9], **knobs)
    given = model.preview(logits=model.logits([1, 5, 9])[-1], prompt_ids=[1, 5, 9], **knobs)
    np.testing.assert_allclose(result.initial.probabilities, given.initial.probabilities, atol=1e-6)
    generated = model.generate([1, 5, 9], max_tokens=4, use_model_defaults=False, ignore_eos=True, **knobs)
    tokens = generated.choices[0].token_ids
    assert result.chosen == given.chosen == tokens[0]
    for count in range(1, 4):
        assert model.preview([1, 5, 9], output_ids=tokens[:count], **knobs).chosen == tokens[count]


def test_padding_is_no_part_of_the_vocabulary(model: LanguageModel) -> None:
    """The model's row is longer than its vocabulary; the distribution is not."""
    assert len(model.logits([1])[-1]) > model.vocab_size
    assert len(model.preview([1]).initial.probabilities) == model.vocab_size
    assert len(model.preview(logits=model.logits([1])[-1]).initial.probabilities) == model.vocab_size


def test_logits_of_another_size_are_refused(model: LanguageModel) -> None:
    """A model refuses a row that it cannot have made."""
    with pytest.raises(InvalidRequestError, match="logits: must have 299 values"):
        model.preview(logits=LOGITS)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "prompt: must be given, or else logits"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt_ids: goes with logits"),
        ({"prompt": [5] * 128}, "prompt: has 128 tokens"),
        ({"prompt": [5] * 120, "output_ids": [5] * 8}, "prompt: has 128 tokens"),
        ({"prompt": [5], "top_k": -7}, "top_k: .* -7"),
    ],
)
def test_wrong_prompts_are_refused(model: LanguageModel, keywords: dict[str, object], message: str) -> None:
    """Before the engine hears of them."""
    with pytest.raises(InvalidRequestError, match=message):
        model.preview(**keywords)


def test_unknown_keyword_is_a_type_error(model: LanguageModel) -> None:
    """It names the nearest one."""
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        model.preview("a", temprature=1.0)
