"""Every formula of a walk holds on the numbers beside it, whatever the family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from treadle_plugin_api.backend import Batch
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.explain.formulas import STREAM, Rule, Values, embedding_rules, final_rules, layer_rules
from treadle_server.explain.steps import HEAD_SENTENCES, head_sentence, layer_sentence
from treadle_server.model.decoder import Decoder

MODELS = sorted(path.name for path in (Path(__file__).parents[1] / "golden" / "models").iterdir())
IDS = [5, 9, 3, 7, 11, 2, 8, 4, 6, 10, 12]  # more than the windows of the models that have one


def traced(folder: Path) -> tuple[DecoderConfig, dict[str, Any], dict[str, Any]]:
    """The config, every intermediate of a pass in float64, and the parameters."""
    with load_checkpoint(folder) as checkpoint:
        params = {name: np.array(weight.view(), np.float64) for name, weight in checkpoint.params.items()}
        decoder = Decoder(checkpoint.config, checkpoint.params, dtype="float64")
        seen: dict[str, Any] = {"ids": np.array(IDS)}
        hidden = decoder.forward(Batch.of([IDS]), observe=seen.__setitem__)
        decoder.head(hidden, seen.__setitem__)
    return checkpoint.config, seen, params


def within(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What has the prefix, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def check(rules: Mapping[str, Rule], values: Values) -> None:
    """Hold each rule's computation against the traced numbers."""
    for name, rule in rules.items():
        if name in values.traced:
            assert (rule.formula == "") == (rule.compute is None), name
            if rule.compute is not None:
                found = rule.compute(values)
                assert_allclose(found, values.traced[name], rtol=1e-9, atol=1e-9, err_msg=f"{name}: {rule.formula}")


@pytest.mark.parametrize("name", MODELS)
def test_every_formula_holds(golden: Path, name: str) -> None:
    """Of the embedding, of every layer, of the logits."""
    config, seen, params = traced(golden / "models" / name)
    check(embedding_rules(config), Values(seen, params))
    entrances = ("embedding_with_positions", "embedding_norm", "embedding")
    stream = next(seen[entrance] for entrance in entrances if entrance in seen)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        arrays = within(prefix, seen)
        rules = layer_rules(config, layer)
        assert arrays.keys() <= rules.keys()
        check(rules, Values(arrays | {STREAM: stream}, within(prefix, params)))
        stream = arrays["mlp_norm" if config.norm.place == "post" else "mlp_residual"]
    check(final_rules(config), Values(seen | {STREAM: stream}, params))


@pytest.mark.parametrize("name", MODELS)
def test_every_intermediate_has_a_sentence(golden: Path, name: str) -> None:
    """Those of a head in the chapter of a head, the others in the layer's."""
    config, seen, _ = traced(golden / "models" / name)
    for layer in range(config.num_layers):
        for one in within(f"layers.{layer}.", seen):
            of_head = one.removeprefix("attention.")
            told = of_head in HEAD_SENTENCES or one == "attention.weights" or layer_sentence(one, config, layer)
            assert told, one


@pytest.mark.parametrize(
    ("name", "step", "formula"),
    [
        ("falcon_7b", "mlp.up", "U = N · W_up"),
        ("gpt_neox", "mlp_norm", "M = (X - mean(X)) / √(variance(X) + 1e-05) · w + b, row by row"),
        ("gpt2", "attention.q", "Q = N · W_q + b_q"),
        ("olmo", "attention.v", "V = N · W_v, cut off at -0.8 and 0.8"),
        ("opt_post_norm", "mlp.up", "U = (Y normed) · W_up + b_up"),
        ("gemma2", "attention_norm", "N = X / √(mean(X²) + 1e-06) · (1 + w), row by row"),
    ],
)
def test_formulas_say_what_a_family_does(golden: Path, name: str, step: str, formula: str) -> None:
    """What feeds a product, biases, clipping and offsets are in the text too."""
    config, _, _ = traced(golden / "models" / name)
    assert layer_rules(config, 0)[step].formula == formula


def test_the_head_of_phi_has_a_bias(golden: Path) -> None:
    """And the formula says so."""
    config, _, _ = traced(golden / "models" / "phi")
    assert final_rules(config)["logits"].formula == "logits = (X normed) · W_head + b_head"


def test_scores_that_stay_are_not_called_smaller(golden: Path) -> None:
    """GPT-Neo multiplies its scores by 1."""
    config, _, _ = traced(golden / "models" / "gpt_neo")
    assert "leaves the scores as they are" in head_sentence("scaled_scores", config, 0)
