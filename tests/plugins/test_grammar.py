"""The grammar stage: what it allows, what it refuses, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from treadle_plugin_api import MissingExtraError, ModelInfo, SamplingContext
from treadle_plugin_api.testing import check_stage
from treadle_samplers.grammar import Grammar
from treadle_server.engine.chain import StageSpec
from treadle_server.errors import InvalidRequestError
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import BUILT_IN_DISTRIBUTION, PluginSource

# End of text, an odd special token that looks like text, and some text.
TOKENS = (b"</s>", b"a", b"b", b"ab", b'"', b"{", b"}", b"1", b"\xe7\x8c", b"\xab", b"", b"<x>")
EOS = 0
INFO = ModelInfo(
    name="tiny",
    vocab_size=len(TOKENS),
    context_length=64,
    eos_ids=frozenset([EOS]),
    token_bytes=lambda token_id: TOKENS[token_id],
    encode=lambda text: [],
    special_ids=frozenset([EOS, 11]),
)
LOGITS = np.zeros(len(TOKENS), dtype=np.float32)


def checked(info: ModelInfo = INFO, **parameters: object) -> Grammar:
    """The stage, ready for the model."""
    stage = Grammar.model_validate_json(json.dumps(parameters), strict=True)
    stage.check(info)
    return stage


def allowed(stage: Grammar, state: object) -> list[int]:
    """Ids that may come next."""
    return np.flatnonzero(stage.apply(LOGITS, context(), state) > -np.inf).tolist()


def context() -> SamplingContext:
    """A request half way."""
    return SamplingContext(vocab_size=len(TOKENS), eos_ids=[EOS])


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: [],
        lambda text: [7],  # other bytes
        lambda text: [11],  # special
        lambda text: [3, 2] if text == "abb" else [1],
        lambda text: int("no text"),
    ],
)
def test_the_only_text_is_written_in_its_tokens(encode):
    """By the model's tokenizer where that gives these bytes, else in the fewest tokens."""
    stage = checked(dataclasses.replace(INFO, encode=encode, memo=type(INFO.memo)()), regex="abb")
    state = stage.start(context())
    for token_id in (3, 2, EOS):
        assert allowed(stage, state) == [token_id]
        stage.accept(state, token_id)


@pytest.mark.parametrize(
    "parameters",
    [{"regex": "[a-z]*"}, {"lark": "start: /[a-z]*/"}, {"gbnf": "root ::= [a-z]*"}],
)
def test_keeps_the_contract(parameters: dict[str, object]):
    """The conformance suite, whatever the grammar is written in."""
    check_stage(Grammar, **parameters)


@pytest.mark.parametrize(
    ("parameters", "first"),
    [
        ({"regex": "a+|1"}, [1, 7]),
        ({"regex": "(ab)*"}, [EOS, 1, 3]),
        ({"regex": "<x>|b"}, [2]),  # a special token is no part of a text, whatever its name
        ({"choice": ["猫", "ab"]}, [1, 3, 8]),  # a character may take several tokens
        ({"choice": ['"\\\n', "b"]}, [2, 4]),
        ({"lark": 'start: "a" start "b" | "1"'}, [1, 7]),
        ({"gbnf": 'root ::= "b" | "{" root "}"'}, [2, 5]),
        ({"json_schema": {"enum": ["a"]}}, [4]),
        ({"json_schema": '{"const": 1}'}, [7]),
        ({"json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}, [5]),
    ],
)
def test_what_may_come_first(parameters: dict[str, object], first: list[int]):
    """Exactly the tokens that a text of the grammar can begin with; the end only where the empty text is one."""
    stage = checked(**parameters)
    assert allowed(stage, stage.start(context())) == first


def test_the_text_ends_where_it_is_complete():
    """The end comes once the text is one of the grammar, alone where nothing can follow, and nothing comes behind."""
    stage = checked(regex="ab?")
    state = stage.start(context())
    stage.accept(state, 1)
    assert allowed(stage, state) == [EOS, 2]
    stage.accept(state, 2)
    assert allowed(stage, state) == [EOS]
    stage.accept(state, EOS)
    assert allowed(stage, state) == [EOS]


def test_choices_go_on_by_themselves():
    """Neither a clone nor another choice of the request notices what is accepted elsewhere."""
    stage = checked(regex="a*b")
    one, other = stage.start(context()), stage.start(context())
    stage.accept(one, 2)
    copy = stage.clone(other)
    stage.accept(other, 3)
    assert (allowed(stage, one), allowed(stage, other), allowed(stage, copy)) == ([EOS], [EOS], [1, 2, 3])


def test_a_tokenizer_that_adds_spaces_is_refused():
    """What stands between the tokens could break any grammar."""
    with pytest.raises(ValueError, match="regex: the model's tokenizer puts spaces between tokens"):
        checked(dataclasses.replace(INFO, text_is_bytes=False), regex="a")


def test_several_ends_and_none():
    """Every end-of-text id of the model is allowed; a model without one fails when the text is complete."""
    two = checked(dataclasses.replace(INFO, eos_ids=frozenset([EOS, 2])), regex="a?")
    assert allowed(two, two.start(context())) == [EOS, 1, 2]
    none = checked(dataclasses.replace(INFO, eos_ids=frozenset()), regex="a")
    state = none.start(context())
    none.accept(state, 1)
    with pytest.raises(RuntimeError, match="complete, and the model has no end-of-text token"):
        allowed(none, state)


def test_a_text_that_cannot_go_on_fails():
    """Neither the first token nor the end is chosen for want of another."""
    stage = checked(regex="a*b2")
    state = stage.start(context())
    stage.accept(state, 2)
    with pytest.raises(RuntimeError, match="allows no token of the model here"):
        allowed(stage, state)
    masked = np.where(np.arange(len(TOKENS)) == 5, LOGITS, -np.inf).astype(np.float32)
    with pytest.raises(RuntimeError, match="was masked before"):
        stage.apply(masked, context(), stage.start(context()))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "exactly one of json_schema, regex, choice, lark, gbnf must be given; received none"),
        ({"regex": "a", "lark": "start: /a/"}, "received regex, lark"),
        ({"regex": "a(b"}, r"regex: at 1\(8\).*unclosed group"),
        ({"regex": "(" * 100_000}, "regex: .*"),
        ({"lark": "start: foo"}, r"lark: at 1\(8\): unknown name"),
        ({"lark": "start: " + "(" * 100_000}, "lark: .*too deeply nested"),
        ({"gbnf": "root ::= ("}, "gbnf: .* at line 1"),
        ({"gbnf": "root ::= foo"}, "gbnf: Rule 'foo' not found"),
        ({"gbnf": "root ::= " + "(" * 50_000}, "gbnf: is nested too deeply"),
        ({"json_schema": '{"type": }'}, "json_schema: Expecting value: line 1 column 10"),
        ({"json_schema": '{"a":' * 50_000}, "json_schema: .*at most|json_schema: is nested too deeply"),
        ({"json_schema": "[" * 50_000}, "json_schema: is nested too deeply"),
        ({"json_schema": {"type": "objct"}}, "json_schema: Invalid type: objct"),
        ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable schema"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "json_schema: .*does not fetch"),
        ({"json_schema": {"not": {}}}, "json_schema: Unimplemented keys"),
        ({"regex": "zz"}, "regex: no token of the model begins a text of the grammar"),
        ({"choice": ["z"]}, "choice: no token"),
    ],
)  # fmt: skip
def test_bad_grammars_are_told(parameters: dict[str, object], message: str):
    """The parser's own words, with the place, when the request is admitted."""
    with pytest.raises(ValueError, match=f"(?s){message}"):
        checked(**parameters)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"choice": []}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"regex": 3}, "regex"),
        ({"lark": "x" * ((1 << 17) + 1)}, "lark"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": True}, "json_schema"),
        ({"regexp": "a"}, "regexp"),
    ],
)
def test_bad_values_name_their_field(manager_of, resolve, parameters: dict[str, object], field: str):
    """Wrong types, empty lists, texts without end, unknown names."""
    with pytest.raises(InvalidRequestError) as caught:
        resolve(Grammar, stages=[StageSpec("grammar", parameters)])
    assert caught.value.violations[0].field.startswith(f"stages[0].parameters.{field}")


def test_the_vocabulary_is_prepared_once():
    """Requests for one model share the table of its tokens."""
    asked = []
    info = dataclasses.replace(
        INFO, token_bytes=lambda token_id: asked.append(token_id) or TOKENS[token_id], memo=type(INFO.memo)()
    )
    for regex in ("a", "b"):
        checked(info, regex=regex)
    assert asked == list(range(len(TOKENS)))


def test_without_the_extra_the_rest_is_there(built_in, monkeypatch):
    """The other stages load, the list says what to install, and so does a request that names the stage."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "treadle_samplers.grammar")

    def load() -> object:
        import treadle_samplers.grammar

        return treadle_samplers.grammar

    manager = PluginManager([built_in, PluginSource("grammar", BUILT_IN_DISTRIBUTION, "0.1.0", load)], strict=True)
    (grammar,) = (plugin for plugin in manager.plugins if plugin.name == "grammar")
    assert grammar.status == "not installed"
    assert grammar.reason == "it needs llguidance: pip install 'treadle-samplers[grammar]'"
    assert "top_k" in manager.registry
    with pytest.raises(KeyError, match=r"no stage 'grammar'; plugin 'grammar' is not installed.*pip install"):
        manager.registry.get("grammar")


def test_a_missing_extra_is_no_fault_of_a_plugin(built_in):
    """Foreign plugins can say the same."""

    def load() -> object:
        raise MissingExtraError("pip install 'other[fast]'")

    manager = PluginManager([built_in, PluginSource("other", "other", "1", load)], strict=True)
    lacking = [plugin.reason for plugin in manager.plugins if plugin.status == "not installed"]
    assert lacking == ["pip install 'other[fast]'"]
