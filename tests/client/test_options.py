"""Keywords and prompts into a GenerationSpec, and what is refused before sending."""

import math
import subprocess
import sys
from fractions import Fraction
from typing import get_type_hints

import pytest
from treadle_client import GenerationOptions, InvalidArgumentError, Message, Stage
from treadle_client._convert import detokenize_request, score_request, tokenize_request, value_from_proto
from treadle_client._options import make_spec, option_paths
from treadle_protos.v1 import generation_pb2
from treadle_protos.v1.generation_pb2 import GenerationSpec
from treadle_protos.v1.value_pb2 import Value


def refused(prompt: object = "a", **options: object) -> list[tuple[str, str]]:
    """Return the violations of a spec that must be refused."""
    with pytest.raises(InvalidArgumentError) as caught:
        make_spec(prompt, options)
    return list(caught.value.violations)


def test_every_proto_field_is_a_keyword() -> None:
    """GenerationOptions names exactly the keywords that the proto has fields for."""
    assert set(get_type_hints(GenerationOptions)) == set(option_paths())


def test_nothing_is_set_that_was_not_given() -> None:
    """Keywords left out or None leave the proto's fields unset."""
    assert make_spec("a", {"temperature": None, "stop": None}) == GenerationSpec(text="a")


def test_zero_can_be_said() -> None:
    """A knob of 0, False or an empty text is set, not dropped."""
    spec = make_spec("a", {"temperature": 0, "ignore_eos": False, "top_k": 0, "seed": 0})
    assert spec.sampling.HasField("temperature")
    assert spec.stopping.HasField("ignore_eos")
    assert spec.sampling.HasField("top_k")
    assert spec.sampling.HasField("seed")


def test_all_groups_are_filled() -> None:
    """Each keyword arrives in its own group under its own name."""
    spec = make_spec(
        "a",
        {"model": "m", "adapter": "d", "preset": "p", "temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": 2**64 - 1}
        | {"order": ["top_k", "greedy"], "use_model_defaults": False, "max_tokens": 5, "min_tokens": 1, "n": 2}
        | {"stop": ["x", "y"], "stop_token_ids": (1, 2), "logprobs": "processed", "top_logprobs": 3, "token_ids": True}
        | {"prompt_logprobs": True, "echo": True, "include_stop": True, "special_tokens": True, "ignore_eos": True},
    )
    sampling = generation_pb2.SamplingOptions(
        temperature=0.5, top_k=-1, top_p=0.9, seed=2**64 - 1, order=["top_k", "greedy"], use_model_defaults=False
    )
    stopping = generation_pb2.StoppingOptions(
        max_tokens=5, min_tokens=1, stop=["x", "y"], stop_token_ids=[1, 2], ignore_eos=True
    )
    response = generation_pb2.ResponseOptions(
        logprobs=generation_pb2.LOGPROBS_MODE_PROCESSED,
        num_top_logprobs=3,
        prompt_logprobs=True,
        token_ids=True,
        echo=True,
        include_stop=True,
        special_tokens=True,
    )
    assert spec == GenerationSpec(
        model="m", adapter="d", preset="p", text="a", sampling=sampling, stopping=stopping, response=response, n=2
    )


def test_one_stop_may_be_a_bare_text() -> None:
    """`stop` takes a text for a list of one."""
    assert list(make_spec("a", {"stop": "\n"}).stopping.stop) == ["\n"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_numbers_that_the_server_judges_are_sent(value: float) -> None:
    """NaN, infinities and numbers out of a knob's range travel; refusing them is the server's part."""
    sent = make_spec("a", {"temperature": value}).sampling.temperature
    assert sent == value or (math.isnan(sent) and math.isnan(value))


def test_stages_by_name_pair_and_object() -> None:
    """A stage is a name, a (name, parameters) pair or a Stage, in the order given."""
    spec = make_spec("a", {"stages": ["first", ("second", {"k": 3}), Stage("third", {"p": 0.5})]})
    stages = spec.sampling.stages
    assert [stage.name for stage in stages] == ["first", "second", "third"]
    assert stages[1].parameters["k"].int_value == 3
    assert stages[2].parameters["p"].double_value == 0.5


def test_parameter_types_stay_apart() -> None:
    """true, 3 and 3.0 arrive as bool, int and double, nested ones too, and come back as they were."""
    given = {"b": True, "i": 3, "d": 3.0, "s": "é", "l": [1, [2.0], []], "m": {"x": {"y": False}, "e": {}}}
    parameters = make_spec("a", {"stages": [("s", given)]}).sampling.stages[0].parameters
    back = {name: value_from_proto(value) for name, value in parameters.items()}
    assert back == given
    assert [type(back[name]) for name in "bid"] == [bool, int, float]


def test_a_value_of_no_known_kind_is_none() -> None:
    """A typed value that a newer server extends reads as None."""
    assert value_from_proto(Value()) is None


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"temperature": True}, "sampling.temperature", "a number, got bool True"),
        ({"temperature": "0.8"}, "sampling.temperature", "a number, got str '0.8'"),
        ({"temperature": 10**400}, "sampling.temperature", "1.8e308, got int 1000"),
        ({"top_k": 3.0}, "sampling.top_k", "a whole number from -9223372036854775808 to 9223372036854775807"),
        ({"top_k": 2**63}, "sampling.top_k", "to 9223372036854775807, got int 9223372036854775808"),
        ({"top_k": True}, "sampling.top_k", "got bool True"),
        ({"seed": -1}, "sampling.seed", "from 0 to 18446744073709551615, got int -1"),
        ({"max_tokens": "5"}, "stopping.max_tokens", "got str '5'"),
        ({"n": 1.5}, "n", "got float 1.5"),
        ({"ignore_eos": 1}, "stopping.ignore_eos", "true or false, got int 1"),
        ({"stop": ["a", 3]}, "stopping.stop[1]", "a text, got int 3"),
        ({"stop": 3}, "stopping.stop", "a list of texts, got int 3"),
        ({"stop": "\ud800"}, "stopping.stop[0]", "character 0 is half of a surrogate pair"),
        ({"stop_token_ids": [1, -2]}, "stopping.stop_token_ids[1]", "from 0 to 4294967295, got int -2"),
        ({"order": "top_k"}, "sampling.order", "a list of texts, got str 'top_k'"),
        ({"model": 3}, "model", "a text, got int 3"),
        ({"model": b"x"}, "model", "a text, got bytes b'x'"),
        ({"logprobs": "cooked"}, "response.logprobs", "'raw' or 'processed', got str 'cooked'"),
        ({"logprobs": True}, "response.logprobs", "'raw' or 'processed', got bool True"),
        ({"stages": "top_k"}, "sampling.stages", "a list of stages, got str"),
        ({"stages": [3]}, "sampling.stages[0]", "a (name, parameters) pair or a Stage, got int 3"),
        ({"stages": [(3, {})]}, "sampling.stages[0].name", "a text, got int 3"),
        ({"stages": [("s", [1])]}, "sampling.stages[0].parameters", "a mapping of parameters, got list"),
        ({"stages": ["s", ("s", {"k": 2**63})]}, "sampling.stages[1].parameters.k", "got int 9223372036854775808"),
        ({"stages": [("s", {"k": None})]}, "sampling.stages[0].parameters.k", "got NoneType None"),
        ({"stages": [("s", {"k": [1, {"x": b""}]})]}, "sampling.stages[0].parameters.k[1].x", "got bytes b''"),
        ({"stages": [("s", {3: 1})]}, "sampling.stages[0].parameters (a name)", "a text, got int 3"),
        ({"stages": [("s", {"k": {3: 1}})]}, "sampling.stages[0].parameters.k (a name)", "a text, got int 3"),
    ],
)
def test_what_protobuf_cannot_carry_is_refused(options: dict[str, object], field: str, words: str) -> None:
    """The violation names the field, what was expected, and the value with its type."""
    ((refused_field, message),) = refused(**options)
    assert refused_field == field
    assert words in message


def test_endless_nesting_is_refused() -> None:
    """A list that holds itself is refused, not followed for ever."""
    endless: list[object] = []
    endless.append(endless)
    ((field, message),) = refused(stages=[("s", {"k": endless})])
    assert field.startswith("sampling.stages[0].parameters.k[0]")
    assert "at most 30 levels" in message


def test_the_deepest_nesting_survives_the_wire() -> None:
    """Thirty levels are within what protobuf reads back."""
    value: object = 1
    for _ in range(30):
        value = {"k": value}
    request = generation_pb2.GenerateRequest(spec=make_spec("a", {"stages": [("s", {"k": value})]}))
    assert generation_pb2.GenerateRequest.FromString(request.SerializeToString()) == request


def test_all_wrong_fields_are_named_at_once() -> None:
    """One error holds every violation, in its text as well."""
    violations = refused([1, -1], seed=-1, n=True)
    assert [field for field, _ in violations] == ["token_ids[1]", "sampling.seed", "n"]


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("temprature", "did you mean 'temperature'"), ("timeout", "did you mean 'timeout_s'"), ("zzz", "top_p")],
)
def test_unknown_keywords_are_type_errors_with_a_hint(keyword: str, hint: str) -> None:
    """A wrong keyword is a TypeError that names the nearest one, or all of them."""
    with pytest.raises(TypeError, match=f"no keyword '{keyword}'.*{hint}"):
        make_spec("a", {keyword: 1})


def test_exact_numbers_of_other_types_are_taken() -> None:
    """Anything that Python calls a real number serves as one, a fraction for instance."""
    assert make_spec("a", {"top_p": Fraction(1, 2)}).sampling.top_p == 0.5


def test_numpy_numbers_and_arrays_are_taken() -> None:
    """NumPy scalars and arrays serve as numbers and token ids; its bool does not."""
    np = pytest.importorskip("numpy")
    spec = make_spec(np.array([1, 2]), {"temperature": np.float32(0.5), "top_k": np.int64(3)})
    assert list(spec.token_ids.ids) == [1, 2]
    assert (spec.sampling.temperature, spec.sampling.top_k) == (0.5, 3)
    assert refused(temperature=np.True_)[0][0] == "sampling.temperature"


@pytest.mark.parametrize("form", [lambda role, text: {"role": role, "content": text}, Message])
def test_messages_are_mappings_or_objects(form: object) -> None:
    """A conversation is a list of mappings or of Message objects."""
    spec = make_spec([form("system", "s"), form("user", "u")], {})  # type: ignore[operator]
    assert [(m.role, m.content) for m in spec.messages.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize(("prompt", "form"), [("", "text"), ([], "token_ids"), ((3,), "token_ids")])
def test_empty_prompts_are_sent(prompt: object, form: str) -> None:
    """An empty prompt is present on the wire; the server decides what it means."""
    assert make_spec(prompt, {}).WhichOneof("prompt") == form


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (3, "prompt", "a text, a list of token ids or a list of messages, got int 3"),
        (b"a", "prompt", "got bytes b'a'"),
        ({"role": "user", "content": "a"}, "prompt", "got dict"),
        ("a\udc80b", "text", "character 1 is half of a surrogate pair"),
        ([1, True], "token_ids[1]", "got bool True"),
        ([1, "a"], "token_ids[1]", "got str 'a'"),
        ([2**32], "token_ids[0]", "from 0 to 4294967295"),
        ([{"role": "user"}], "messages[0]", "role and content"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0]", "nothing else"),
        ([{"role": "user", "content": 3}], "messages[0].content", "a text, got int 3"),
        ([Message("user", "a"), 3], "messages[1]", "role and content"),
    ],
)
def test_wrong_prompts_are_refused(prompt: object, field: str, words: str) -> None:
    """A prompt of no known form is refused with the place and the value."""
    ((refused_field, message),) = refused(prompt)
    assert refused_field == field
    assert words in message


def test_other_requests_share_the_checks() -> None:
    """Score, Tokenize and Detokenize convert and refuse as generation does."""
    assert score_request([1], num_top_logprobs=2, model=None).num_top_logprobs == 2
    assert tokenize_request("a", add_special_tokens=False).HasField("add_special_tokens")
    assert list(detokenize_request(token_ids=[5, 6]).token_ids) == [5, 6]
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]"):
        tokenize_request([1])
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[0\].*got int -1"):
        detokenize_request(token_ids=[-1])


def test_numpy_is_never_imported() -> None:
    """Importing the client and building a request does not import numpy."""
    code = (
        "import sys, treadle_client; from treadle_client._options import make_spec; make_spec([1], {'top_p': 0.5});"
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
