"""A trace shows what the pass computed, as much of it as was asked for, within its limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model import RequestLimits, Trace

IDS = [1, 5, 9, 5]


@pytest.fixture(scope="module")
def trace(model: LanguageModel) -> Trace:
    """Everything about a pass over four tokens."""
    return model.trace(IDS)


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The tiny model with small limits."""
    limits = RequestLimits(max_trace_tokens=5, max_trace_bytes=10_000)
    with LanguageModel.load(tiny_folder, request_limits=limits) as loaded:
        yield loaded


def test_logits_are_the_model_s(model: LanguageModel, trace: Trace) -> None:
    """The traced logits are those of the same pass untraced, bit for bit."""
    np.testing.assert_array_equal(trace["logits"], model.logits(IDS))


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_weights_are_causal_distributions(trace: Trace, layer: int) -> None:
    """Every row of every head sums to 1 and gives later tokens nothing."""
    weights = trace[f"layers.{layer}.attention.weights"]
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    assert not np.triu(weights, 1).any()


def test_shapes_follow_the_config(model: LanguageModel, trace: Trace) -> None:
    """Queries are [heads, tokens, head_dim], scores [heads, tokens, tokens], residuals [tokens, dim]."""
    config, tokens = model.config, len(IDS)
    heads, kv_heads, head_dim = config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim
    expected = {"q": (heads, tokens, head_dim), "k": (kv_heads, tokens, head_dim), "v": (kv_heads, tokens, head_dim)}
    expected |= dict.fromkeys(("scores", "scaled_scores", "masked_scores", "weights"), (heads, tokens, tokens))
    expected |= {"heads": (tokens, heads * head_dim), "projection": (tokens, config.dim)}
    for name, shape in expected.items():
        assert trace[f"layers.0.attention.{name}"].shape == shape
    assert trace["embedding"].shape == trace["layers.1.mlp_residual"].shape == (tokens, config.dim)


def test_formulas_hold_between_intermediates(model: LanguageModel, trace: Trace) -> None:
    """Scores are queries times keys, scaled by the config's scale; heads are weights times values."""
    seen = {name: trace[f"layers.0.attention.{name}"].astype(np.float64) for name in ("q_rotated", "k_rotated", "v")}
    group = model.config.attention.group_size
    keys, values = (np.repeat(seen[name], group, axis=0) for name in ("k_rotated", "v"))
    scores = seen["q_rotated"] @ keys.transpose(0, 2, 1)
    np.testing.assert_allclose(trace["layers.0.attention.scores"], scores, atol=1e-5)
    scaled = trace["layers.0.attention.scaled_scores"]
    np.testing.assert_allclose(scaled, scores * model.config.attention.scale, atol=1e-5)
    heads = (trace["layers.0.attention.weights"] @ values).transpose(1, 0, 2).reshape(len(IDS), -1)
    np.testing.assert_allclose(trace["layers.0.attention.heads"], heads, atol=1e-5)


def test_names_come_in_the_order_of_the_pass(trace: Trace) -> None:
    """The embedding is first, the logits are last, layer 0 comes before layer 1."""
    names = list(trace)
    assert (names[0], names[-1]) == ("embedding", "logits")
    assert names.index("layers.0.mlp_residual") < names.index("layers.1.attention.q")
    assert trace.token_ids == tuple(IDS)


@pytest.mark.parametrize(
    ("what", "layers", "expected"),
    [
        ("logits", None, {"logits"}),
        (["logits", "embedding"], None, {"logits", "embedding"}),
        ("attention.weights", None, {"layers.0.attention.weights", "layers.1.attention.weights"}),
        ("weights", [1], {"layers.1.attention.weights"}),
        (["q", "logits"], [0], {"layers.0.attention.q", "logits"}),
        ("layers.1.mlp.down", [], {"layers.1.mlp.down"}),
        ("*norm", [0], {"layers.0.attention_norm", "layers.0.mlp_norm", "final_norm"}),
        ("attention.*_scores", [0], {f"layers.0.attention.{kind}_scores" for kind in ("scaled", "masked")}),
    ],
)
def test_a_name_picks_whole_parts(model: LanguageModel, what: object, layers: object, expected: set[str]) -> None:
    """A name stands for all that have it as whole dotted parts, a star for any text, within the layers asked for."""
    assert set(model.trace(IDS, layers=layers, what=what)) == expected


def test_layers_leave_the_rest_alone(model: LanguageModel, trace: Trace) -> None:
    """Asking for layer 1 leaves out layer 0 and nothing else, and changes no number."""
    part = model.trace(IDS, layers=[1])
    assert part.keys() == {name for name in trace if not name.startswith("layers.0.")}
    np.testing.assert_array_equal(part["layers.1.attention.q"], trace["layers.1.attention.q"])


def test_forms_of_prompt(model: LanguageModel) -> None:
    """A text is encoded as for generation."""
    traced = model.trace("hello", what="logits")
    assert traced.token_ids == model.generate("hello", max_tokens=1).prompt_info.prompt_ids


WRONG = [
    ({"prompt": [300]}, "prompt[0]", "outside the vocabulary"),
    ({"prompt": [5] * 129}, "prompt", "has 129 tokens; there is room for 128: the model's context is 128 tokens"),
    ({"layers": [2]}, "layers[0]", "must be in [0, 1], got 2"),
    ({"layers": [0, -1]}, "layers[1]", "must be in [0, 1], got -1"),
    ({"layers": [True]}, "layers[0]", "must be an integer, got True"),
    ({"layers": [0] * 9}, "layers", "at most 2 entries, got 9"),
    ({"what": "nope"}, "what[0]", "'nope' names no intermediate; there are: embedding, layers.N."),
    ({"what": ["q", "attention.weight"]}, "what[1]", "layers.N.attention.weights"),
    ({"what": [3]}, "what[0]", "must be a text, got 3"),
    ({"what": ["x" * 300]}, "what[0]", "256"),
    ({"what": ["q"] * 300}, "what", "at most 256 entries, got 300"),
    ({"what": "layers.0", "layers": [1]}, "what", "names nothing that is in the layers 1"),
]


@pytest.mark.parametrize(("keywords", "field", "message"), WRONG, ids=[f"{f}-{m[:20]}" for _, f, m in WRONG])
def test_wrong_requests_name_the_field(
    model: LanguageModel, keywords: dict[str, object], field: str, message: str
) -> None:
    """The refusal names field, value and range."""
    with pytest.raises(InvalidRequestError) as caught:
        model.trace(**{"prompt": IDS} | keywords)
    violation = caught.value.violations[0]
    assert violation.field == field
    assert message in violation.message


def test_too_many_tokens_are_refused(small: LanguageModel) -> None:
    """The refusal names count and limit."""
    with pytest.raises(InvalidRequestError, match="prompt: has 6 tokens; a trace takes at most 5"):
        small.trace([5] * 6)


def test_too_many_bytes_are_refused_before_the_pass(model: LanguageModel, small: LanguageModel) -> None:
    """The refusal names the exact size and the limit; what fits is still to be had."""
    everything = sum(array.nbytes for array in model.trace([5] * 5).values())
    with pytest.raises(InvalidRequestError, match=f"what: selects {everything} bytes; a trace gives out at most 10000"):
        small.trace([5] * 5)
    assert small.trace([5] * 5, what="logits")["logits"].nbytes == 5 * small.config.vocab_size * 4


def test_traces_and_streams_go_on_beside_each_other(model: LanguageModel) -> None:
    """A trace between the steps of a stream changes neither."""
    alone = model.generate(IDS, max_tokens=40, seed=1, ignore_eos=True).choices[0].token_ids
    beside: list[tuple[int, ...]] = []
    options = {"max_tokens": 40, "seed": 1, "ignore_eos": True}
    reader = threading.Thread(target=lambda: beside.append(model.generate(IDS, **options).choices[0].token_ids))
    reader.start()
    traced = model.trace(IDS, what="logits")["logits"]
    reader.join()
    assert beside == [alone]
    np.testing.assert_array_equal(traced, model.logits(IDS))


@pytest.mark.parametrize("keywords", [{"layers": 5}, {"what": 5}], ids=str)
def test_what_is_no_list_is_refused(model: LanguageModel, keywords: dict) -> None:
    """A number in place of a list names the field."""
    with pytest.raises(InvalidRequestError, match="must be a list, got 5"):
        model.trace([5], **keywords)


def test_streams_go_on_while_a_trace_runs(tiny_folder: Path, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of the pass, the end over the vocabulary included, the engines have their turns."""
    monkeypatch.setattr("treadle_server.language_model.trace._TURN_S", 0.0)
    with LanguageModel.load(tiny_folder, numerics="reproducible") as model:
        quiet = model.trace([7] * 100)
        alone = model.generate([5, 6], max_tokens=120, ignore_eos=True, seed=2)
        running = begin(model, [5, 6], max_tokens=120, ignore_eos=True, seed=2)

        def trace() -> tuple[int, Trace]:
            before = model.engine.num_generated_tokens
            traced = model._tracer._trace([7] * 100, frozenset(quiet), None)
            return model.engine.num_generated_tokens - before, traced

        num_tokens, traced = model.call(trace).result()
        assert num_tokens > 20  # two layers with some 20 parts each
        assert running.finish().choices[0].token_ids == alone.choices[0].token_ids
        for name, array in traced.items():
            np.testing.assert_array_equal(array, quiet[name])
