"""From knobs, named stages and an order to a chain."""

from typing import Any

import numpy as np
import pytest
from treadle_plugin_api import Field, Select, Stage
from treadle_server.engine.chain import SamplingChain, StageSpec
from treadle_server.errors import InvalidRequestError, StageError


class Tilt(Stage):
    """A foreign filter with a parameter."""

    name = "tilt"
    kind = "filter"
    strength: float = Field(default=1.0, ge=0, lt=10, description="x")
    words: list[str] = Field(default=[], description="x")
    bias: dict[int, float] = Field(default={}, description="x")

    def apply(self, logits, context, state=None):
        """Nothing."""
        return logits


class Warp(Tilt):
    """A foreign transform."""

    name = "warp"
    kind = "transform"


class Veil(Tilt):
    """A foreign mask."""

    name = "veil"
    kind = "mask"


class Fade(Tilt):
    """A foreign penalty."""

    name = "fade"
    kind = "penalty"


class Still(Tilt):
    """A foreign mask that says it changes no argmax."""

    name = "still"
    kind = "mask"
    argmax_invariant = True


class Needy(Tilt):
    """A stage with a required parameter and a check."""

    name = "needy"
    size: int = Field(ge=1, description="x")

    def check(self, model_info):
        """At most the vocabulary."""
        if self.size > model_info.vocab_size:
            raise ValueError(f"size {self.size} is over the vocabulary of {model_info.vocab_size}")


class Coin(Select):
    """A foreign select."""

    name = "coin"

    def apply(self, logits, context, state=None):
        """The largest."""
        return int(logits.argmax())


FOREIGN = (Tilt, Warp, Veil, Fade, Still, Needy, Coin)


def names(chain: SamplingChain) -> list[str]:
    """The stages in order."""
    return [stage.name for stage in chain.stages]


@pytest.fixture
def chain(resolve):
    """Names of the resolved stages of a request."""
    return lambda **request: names(resolve(*FOREIGN, **request))


@pytest.fixture
def refusal(resolve):
    """Violations of a request, by field."""

    def refused(**request: Any) -> dict[str, str]:
        with pytest.raises(InvalidRequestError) as caught:
            resolve(*FOREIGN, **request)
        return {violation.field: violation.message for violation in caught.value.violations}

    return refused


def named(*stages: str | tuple[str, dict[str, object]]) -> list[StageSpec]:
    """Stages as a request names them."""
    return [StageSpec(stage) if isinstance(stage, str) else StageSpec(*stage) for stage in stages]


def test_nothing_given_draws_from_the_model(chain):
    """Temperature 1 and every filter off: only the select."""
    assert chain() == ["categorical"]


def test_knobs_make_stages_in_default_order(chain):
    """Mask, temperature, top_k, top_p, select, however they are given."""
    request = {"top_p": 0.9, "top_k": 5, "temperature": 0.7, "min_tokens": 2}
    assert chain(**request) == ["min_tokens", "temperature", "top_k", "top_p", "categorical"]


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"top_p": 1}, {"temperature": 1.0}])
def test_off_values_make_no_stage(chain, off):
    """A knob at its off value is as good as unset, and beats a default."""
    assert chain(**off) == ["categorical"]
    assert chain(**off, defaults={next(iter(off)): 0.5 if "top_k" not in off else 5}) == ["categorical"]


def test_explicit_beats_defaults(resolve):
    """A knob of the request replaces the default; the effective values tell."""
    chain = resolve(defaults={"top_k": 50, "temperature": 0.6, "eos_token_id": 2}, top_k=5)
    assert chain.stages[1].stage.top_k == 5
    in_force = {name: chain.knobs[name] for name in ("min_tokens", "temperature", "top_k", "top_p")}
    assert in_force == {"min_tokens": 0, "temperature": 0.6, "top_k": 5, "top_p": 1.0}


def test_named_stages_join_at_their_kind(chain):
    """Masks, penalties, temperature, other transforms, top_k, top_p, other filters."""
    stages = named("tilt", "warp", "fade", "veil")
    assert chain(stages=stages, temperature=0.5, top_k=3, top_p=0.5, min_tokens=1) == [
        "min_tokens", "veil", "fade", "temperature", "warp", "top_k", "top_p", "tilt", "categorical",
    ]  # fmt: skip


def test_named_stages_keep_their_order_within_a_kind(chain):
    """In the order given, also where the default order is another."""
    assert chain(stages=named("tilt", "top_k")) == ["tilt", "top_k", "categorical"]
    assert chain(stages=named("top_p", "top_k")) == ["top_p", "top_k", "categorical"]
    assert chain(stages=named("warp", "temperature")) == ["warp", "temperature", "categorical"]
    assert chain(stages=named("top_k"), top_p=0.5) == ["top_k", "top_p", "categorical"]


def test_naming_a_stage_turns_it_on(resolve):
    """With its default parameters, or the given ones."""
    assert resolve(stages=named("top_k")).stages[0].stage.top_k == 40
    assert resolve(stages=named(("top_k", {"top_k": 3}))).stages[0].stage.top_k == 3


def test_a_named_stage_replaces_a_default(resolve):
    """What the request names wins over the model's default of the same stage."""
    chain = resolve(stages=named(("top_k", {"top_k": 3})), defaults={"top_k": 50})
    assert names(chain) == ["top_k", "categorical"]
    assert chain.knobs["top_k"] == 3


def test_a_stage_may_be_named_twice(resolve):
    """Both run, each with a random stream of its own."""
    first, second, _ = resolve(Tilt, stages=named("tilt", "tilt")).stages
    assert first.key != second.key


def test_knob_and_named_stage_of_one_name_are_refused(refusal):
    """Which one is meant cannot be known."""
    assert "twice" in refusal(top_k=5, stages=named("top_k"))["top_k"]


def test_order_sets_everything(chain):
    """The given order is the order."""
    order = ["top_p", "temperature", "categorical"]
    assert chain(temperature=0.5, top_p=0.8, order=order) == order


def test_order_gets_a_select(chain):
    """An order without a select ends with the usual one."""
    assert chain(temperature=0.5, order=["temperature"]) == ["temperature", "categorical"]
    assert chain(order=[]) == ["categorical"]


def test_order_drops_defaults_it_leaves_out(resolve):
    """Stages of the model's defaults or a preset give way; the effective values tell."""
    preset = StageSpec("tilt", explicit=False)
    chain = resolve(*FOREIGN, defaults={"temperature": 0.6, "top_k": 50}, stages=[preset], order=["temperature"])
    assert names(chain) == ["temperature", "categorical"]
    assert chain.knobs["top_k"] == 0


def test_order_must_name_what_is_asked_for(refusal):
    """An explicit knob or stage left out is an error."""
    assert "leaves out 'temperature', which temperature" in refusal(temperature=0.5, order=["top_k"])["order"]
    assert "leaves out 'tilt', which stages[0]" in refusal(stages=named("tilt"), order=["top_k"])["order"]


def test_order_refuses_repeats_and_unknown_names(refusal):
    """Each wrong entry by its index."""
    fields = refusal(temperature=0.5, order=["temperature", "temperature", "nope"])
    assert "second time" in fields["order[1]"]
    assert "'nope'; known stages" in fields["order[2]"]
    assert "2 times" in refusal(stages=named("tilt", "tilt"), order=["tilt"])["stages"]


def test_order_turns_on_stages_without_knobs(chain):
    """A stage is on when named; one that has a knob is on or off by that knob."""
    assert chain(order=["tilt", "top_k", "greedy"]) == ["tilt", "greedy"]


def test_order_needs_parameters_that_are_required(refusal):
    """A stage with a required parameter cannot be turned on by its name alone."""
    assert "size is required" in refusal(order=["needy"])["order[0]"]


def test_order_keeps_the_select_last(refusal):
    """Nothing runs after the choice."""
    assert "select comes last" in refusal(temperature=0.5, order=["categorical", "temperature"])["order"]


def test_two_selects_are_refused(refusal):
    """The second one is named."""
    assert "second select stage beside 'greedy'" in refusal(stages=named("greedy", "coin"))["stages[1]"]


def test_a_select_of_a_preset_gives_way(chain):
    """The request's own select replaces it."""
    assert chain(stages=[StageSpec("coin", explicit=False), StageSpec("categorical")]) == ["categorical"]
    assert chain(stages=[StageSpec("coin", explicit=False)]) == ["coin"]


@pytest.mark.parametrize("temperature", [0, 0.0, 9.9e-6])
def test_temperature_zero_is_greedy(resolve, temperature):
    """Masks and penalties stay, everything else is skipped."""
    chain = resolve(
        *FOREIGN, temperature=temperature, top_k=5, min_tokens=1, stages=named("warp", "fade", "tilt", "veil")
    )
    assert names(chain) == ["min_tokens", "veil", "fade", "greedy"]
    assert chain.is_greedy
    assert chain.knobs["temperature"] == temperature


def test_least_temperature_draws(chain):
    """1e-5 itself still draws."""
    assert chain(temperature=1e-5) == ["temperature", "categorical"]


def test_temperature_zero_by_name_is_greedy(chain):
    """However the temperature came in; a named categorical becomes greedy, which is its limit."""
    cold = ("temperature", {"temperature": 0.0})
    assert chain(stages=named(cold)) == ["greedy"]
    assert chain(stages=named(cold, "categorical")) == ["greedy"]
    assert chain(temperature=0, order=["temperature", "categorical"]) == ["greedy"]


def test_temperature_zero_and_a_foreign_select_are_refused(refusal, chain):
    """One of the two would be ignored; as a default the temperature gives way."""
    assert "'coin'" in refusal(temperature=0, stages=named("coin"))["temperature"]
    assert chain(defaults={"temperature": 0}, stages=named("coin")) == ["coin"]


def test_greedy_skips_what_cannot_matter(chain):
    """Stages that keep the argmax are skipped, but not before one that could change it."""
    assert chain(stages=named("greedy"), temperature=0.5, top_k=5) == ["greedy"]
    assert chain(stages=named("greedy", "tilt"), temperature=0.5) == ["temperature", "tilt", "greedy"]
    assert chain(stages=named("still", "veil"), temperature=0) == ["still", "veil", "greedy"]
    assert chain(stages=named("veil", "still"), temperature=0) == ["veil", "greedy"]


@pytest.mark.parametrize(
    ("knob", "value", "expected"),
    [
        ("top_p", 0.0, "must be a number above 0 and at most 1; received 0.0"),
        ("top_p", 1.5, "must be a number above 0 and at most 1; received 1.5"),
        ("top_p", float("nan"), "received nan"),
        ("top_p", True, "received True"),
        ("top_p", "0.5", "received '0.5'"),
        ("top_p", np.float32(0.5), "received 0.5 (numpy.float32)"),
        ("temperature", -0.1, "must be a number at least 0; received -0.1"),
        ("temperature", float("inf"), "received inf"),
        ("temperature", [1], "received [1]"),
        ("top_k", -2, "must be an integer at least 1 and at most 2147483647, or 0 or -1 for off; received -2"),
        ("top_k", 3.0, "received 3.0"),
        ("top_k", 0.0, "received 0.0"),
        ("top_k", True, "received True"),
        ("top_k", False, "received False"),
        ("top_k", 2**63, "received 9223372036854775808"),
        ("top_k", np.int64(3), "received 3 (numpy.int64)"),
        ("min_tokens", -1, "or 0 for off; received -1"),
        ("min_tokens", None, "received None"),
    ],
)
def test_bad_knobs_name_field_range_and_value(refusal, knob, value, expected):
    """Every wrong knob is refused with what it takes and what came."""
    fields = refusal(**{knob: value})
    assert list(fields) == [knob]
    assert expected in fields[knob]


def test_huge_integers_are_refused(refusal):
    """Also those that Python itself refuses to print."""
    assert "received an integer of 16610 bits" in refusal(top_k=10**5000)["top_k"]


def test_all_wrong_fields_are_told_together(refusal):
    """One answer, every mistake."""
    stages = named("nope", ("tilt", {"strength": 10, "sort": 1}))
    assert set(refusal(top_p=2.0, top_q=1, stages=stages)) == {
        "top_p",
        "top_q",
        "stages[0].name",
        "stages[1].parameters.strength",
        "stages[1].parameters.sort",
    }


def test_unknown_names_list_the_known(refusal):
    """Unknown knob, stage and parameter each say what there is."""
    fields = refusal(top_q=1, stages=named("nope", ("tilt", {"sort": 1})))
    assert "temperature, dynatemp_range, dynatemp_exponent, top_k, top_p" in fields["top_q"]
    assert "temperature, top_k, top_p, min_p" in fields["stages[0].name"]
    assert "its parameters: strength, words, bias" in fields["stages[1].parameters.sort"]


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"strength": 10.0}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"words": ["a", 3]}, "words[1]"),
        ({"words": "a"}, "words"),
        ({"bias": {"3": float("inf")}}, "bias.3"),
        ({"bias": {"x": 1.0}}, "bias.x.[key]"),
        ({"bias": {3.0: 1.0}}, "bias.3.0"),
        ({"words": [b"a"]}, "words[0]"),
    ],
)
def test_bad_parameters_have_paths(refusal, parameters, field):
    """Nested values are found by their path."""
    assert f"stages[0].parameters.{field}" in refusal(stages=named(("tilt", parameters)))


def test_typed_parameters_arrive(resolve):
    """Lists, maps with whole-number keys, and whole numbers for real ones are taken."""
    stage = resolve(Tilt, stages=named(("tilt", {"strength": 3, "words": ("a", "b"), "bias": {5: 1, "6": 2.5}})))
    tilt = stage.stages[0].stage
    assert (tilt.strength, tilt.words, tilt.bias) == (3.0, ["a", "b"], {5: 1.0, 6: 2.5})


def test_required_parameter(refusal):
    """A missing one is named."""
    assert "required" in refusal(stages=named("needy"))["stages[0].parameters.size"]


def test_check_sees_the_model(refusal, chain):
    """What fits no model is refused at admission, with the stage's own words."""
    assert chain(stages=named(("needy", {"size": 8}))) == ["needy", "categorical"]
    assert refusal(stages=named(("needy", {"size": 9}))) == {
        "stages[0].parameters": "size 9 is over the vocabulary of 8"
    }


def test_a_check_that_breaks_names_plugin_and_stage(resolve):
    """Anything but ValueError is the plugin's fault, not the request's."""

    class Broken(Tilt):
        """Its check has a bug."""

        name = "broken"

        def check(self, model_info):
            """A bug."""
            raise KeyError("x")

    with pytest.raises(StageError, match="'broken' of plugin 'mine' raised KeyError"):
        resolve(Broken, stages=named("broken"))


def test_wrong_defaults_say_where_they_come_from(refusal):
    """A model's own bad setting is not blamed on the request."""
    assert "preset or the model's defaults" in refusal(defaults={"temperature": -1})["temperature"]
