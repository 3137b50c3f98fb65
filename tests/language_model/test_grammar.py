"""Generation within a grammar: whatever the model would say, what it says is a text of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_server import LanguageModel
from treadle_server.engine.events import FinishReason
from treadle_server.errors import ConstraintError, InvalidRequestError, StageError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( [a-zé猫]{1,4})?"


def texts(model: LanguageModel, parameters: Mapping[str, object], **knobs: object) -> list[str]:
    """Finished texts of some choices, drawn at a temperature at which the tiny model says anything."""
    settings = {"temperature": 1.5, "max_tokens": 100, "n": 4, **knobs}
    result = model.generate("Once", stages=[("grammar", parameters)], **settings)
    assert {choice.finish.reason for choice in result.choices} == {FinishReason.EOS}
    return [choice.text for choice in result.choices]


def is_person(text: str) -> bool:
    """Whether a text is JSON of the schema above."""
    person = json.loads(text)
    return (
        set(person) - {"tags"} == {"name", "age"}
        and len(person["name"]) <= 6
        and 0 <= person["age"] <= 150
        and len(person.get("tags", [])) <= 2
        and set(person.get("tags", [])) <= {"a", "b", 3}
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64 - 1), as_text=st.booleans())
def test_json_always_parses(model: LanguageModel, seed: int, as_text: bool) -> None:
    """Every choice is JSON of the schema, whether that came as an object or as text."""
    schema = json.dumps(PERSON) if as_text else PERSON
    assert all(map(is_person, texts(model, {"json_schema": schema}, seed=seed)))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64 - 1))
def test_regular_expressions_always_match(model: LanguageModel, seed: int) -> None:
    """Every choice matches as a whole, characters of several tokens included."""
    assert all(re.fullmatch(DATE, text) for text in texts(model, {"regex": DATE}, seed=seed))


@pytest.mark.parametrize(
    ("guidance", "pattern"),
    [
        ({}, r"\[( |\n {0,24})?1( |\n {0,24})?\]"),
        ({"whitespace_flexible": False}, r"\[1\]"),
        ({"whitespace_pattern": "_{0,3}"}, r"\[_{0,3}1_{0,3}\]"),
    ],
)
def test_white_space_in_json(model: LanguageModel, guidance: Mapping[str, object], pattern: str) -> None:
    """As a printer would write it, or as the schema says."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 1, "x-guidance": guidance}
    assert all(re.fullmatch(pattern, text) for text in texts(model, {"json_schema": schema}, n=16, seed=2))


def test_choices_are_choices(model: LanguageModel) -> None:
    """One of the texts, to the letter; with enough draws each of them."""
    choices = ["猫", 'say "no"', "a\nb", "a"]
    assert set(texts(model, {"choice": choices}, n=64, seed=3)) == set(choices)


@pytest.mark.parametrize(
    ("parameters", "pattern"),
    [
        ({"lark": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"gbnf": 'root ::= "yes" | "no, " root'}, r"(no, )*yes"),
    ],
)
def test_grammars_in_lark_and_gbnf(model: LanguageModel, parameters: Mapping[str, object], pattern: str) -> None:
    """Recursion included."""
    for text in texts(model, parameters, seed=5):
        assert re.fullmatch(pattern, text)
        assert text.count("(") == text.count(")")


def test_greedy_and_reproducible_and_streamed_are_the_same(exact_model: LanguageModel) -> None:
    """The stage is one of the chain like any other: same seed, same text, alone or beside others."""
    (alone,) = texts(exact_model, {"json_schema": PERSON}, n=1, seed=9)
    assert texts(exact_model, {"json_schema": PERSON}, n=3, seed=9)[0] == alone
    first, second = (texts(exact_model, {"json_schema": PERSON}, n=1, temperature=0.0) for _ in range(2))
    assert first == second
    assert is_person(first[0])


def test_speculation_changes_nothing(exact_model: LanguageModel) -> None:
    """Drafted tokens meet the grammar as sampled ones do."""
    plain = texts(exact_model, {"regex": "(abcabc ){6}"}, n=1, seed=4)
    assert texts(exact_model, {"regex": "(abcabc ){6}"}, n=1, seed=4, speculation="prompt_lookup") == plain


def test_ignored_ends_add_nothing(model: LanguageModel) -> None:
    """With ignore_eos the model goes on, yet nothing comes behind a complete text."""
    result = model.generate("x", stages=[("grammar", {"choice": ["ab"]})], ignore_eos=True, max_tokens=10, seed=1)
    assert result.choices[0].text == "ab"


def test_a_grammar_and_min_tokens_that_exclude_each_other(model: LanguageModel) -> None:
    """Where the end is masked before the grammar, a complete text is an error, not a token of nobody's choice."""
    order = ["min_tokens", "grammar", "temperature", "categorical"]
    with pytest.raises(StageError, match="every token that the grammar allows was masked before"):
        texts(model, {"choice": ["a"]}, min_tokens=5, order=order)


def test_a_bad_grammar_is_the_clients_mistake(model: LanguageModel) -> None:
    """The parser's message and position arrive as a violation of the field."""
    with pytest.raises(InvalidRequestError) as caught:
        texts(model, {"lark": "start: foo"})
    (violation,) = caught.value.violations
    assert violation.field == "stages[0].parameters"
    assert "1(8): unknown name" in violation.message


@pytest.mark.network
def test_a_real_model_writes_json(smollm2: Path) -> None:
    """SmolLM2 at a high temperature writes nothing but people and dates."""
    with LanguageModel.load(smollm2) as real:
        for seed in range(3):
            assert all(map(is_person, texts(real, {"json_schema": PERSON}, n=2, seed=seed)))
            assert all(re.fullmatch(DATE, text) for text in texts(real, {"regex": DATE}, n=2, seed=seed))


def test_thousands_of_choices_and_marks_of_regular_expressions(model: LanguageModel) -> None:
    """A choice may have more texts than the parser takes rules, and each text stands for itself alone."""
    many = [f"{i}x" for i in range(3000)]
    assert model.generate("Once", stages=[("grammar", {"choice": many})], seed=1).text in many
    for text in ("a.b", "(c)", "[d]", "{e}", "^$", "\\", "x|y", "猫 追", "~#&-/", '\n\t"q"'):
        assert model.generate("Once", stages=[("grammar", {"choice": [text]})], seed=1).text == text


def test_grammar_comes_before_the_masks_that_give_way(model: LanguageModel) -> None:
    """min_tokens lets a text end where the grammar leaves nothing else."""
    text = model.generate("Once", stages=[("grammar", {"choice": ["abc", "xyz"]})], min_tokens=10, seed=1).text
    assert text in ("abc", "xyz")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"allowed_token_ids": [5], "suppress_tokens": [5]}, "no token is left"),
        ({"stages": [("grammar", {"regex": "a{1000000}"})]}, "too many expressions"),
        ({"stages": [("grammar", {"lark": 'start: "a" start'})]}, "Too many items"),
    ],
)
def test_request_that_contradicts_itself_is_told_so(model: LanguageModel, request_: dict, message: str) -> None:
    """What leaves no token to choose is the request's own fault, with the reason of whoever found it."""
    with pytest.raises(ConstraintError, match=message):
        model.generate("Once", **request_)
