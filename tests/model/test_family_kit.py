"""The kit for family authors: it passes every built-in family and finds each kind of mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from treadle_plugin_api.family import Family
from treadle_server.model.families.llama import LLAMA
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.testing import check_family

MODELS = sorted(path.name for path in (Path(__file__).parents[1] / "golden" / "models").iterdir())
TINY = {
    "model_type": "llama",
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_built_in_family_passes(golden, name):
    """Tables are inverted by loading and saving; caches, batches and reproducible mode hold for every fixture."""
    hf_config = json.loads((golden / "models" / name / "config.json").read_text())
    family = FamilyRegistry().find(hf_config["model_type"])
    check_family(family, hf_config)


def broken(**changes: object) -> Family:
    """Llama with something changed."""
    return replace(LLAMA, **changes)


def without_last(config):
    """A table that forgets the head."""
    return LLAMA.tensor_table(config)[:-1]


def with_a_repeat(config):
    """A table that names its first parameter twice."""
    return (*LLAMA.tensor_table(config), replace(LLAMA.tensor_table(config)[0], file_name="again"))


def with_groups(config):
    """A table whose groups do not divide the rows of the queries."""
    return tuple(replace(e, groups=3) if "q_proj" in e.file_name else e for e in LLAMA.tensor_table(config))


def with_unknown(config):
    """A table that names a parameter no decoder has."""
    return (*LLAMA.tensor_table(config), replace(LLAMA.tensor_table(config)[0], params=("extra.weight",)))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (broken(tensor_table=without_last), "tensor table 0: .*lacks 'head.weight'"),
        (broken(tensor_table=with_a_repeat), "names twice 'embedding.weight'"),
        (broken(other_tables=(with_unknown,)), "tensor table 1: .*the unknown parameter 'extra.weight'"),
        (broken(tensor_table=lambda config: None), "tensor table 0: .*NoneType"),
        (broken(tensor_table=lambda config: ("a",)), "tensor table 0: .*not a TensorEntry"),
        (broken(config_from_hf=lambda values: 1 / 0), "the family fails: ZeroDivisionError"),
        (broken(config_from_hf=lambda values: None), "config_from_hf returned None, not a DecoderConfig"),
        (broken(ignored=("(",)), "the family fails: .*ignored"),
        (broken(ignored=(r".*q_proj.*",)), "the family fails: .*q_proj.*is missing"),
        (broken(other_tables=(lambda config: None,)), "tensor table 1: .*NoneType"),
        (broken(tensor_table=with_groups), "tensor table 0: .*groups=3"),
        (broken(model_type="mine"), "hf_config must have model_type 'mine'"),
    ],
)
def test_mistakes_are_named(family, message):
    """The assertion says what is wrong, and in which table."""
    with pytest.raises(AssertionError, match=message):
        check_family(family, TINY)
