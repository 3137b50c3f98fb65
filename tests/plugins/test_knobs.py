"""The plain knobs of the built-in stages: off, on, in which order, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_protos.v1.generation_pb2 import SamplingOptions
from treadle_server.engine.chain import SamplingChain, StageSpec, sample_rows
from treadle_server.errors import InvalidRequestError

NAN, INF = float("nan"), float("inf")

# A value that turns each stage on, in the default order of the stages.
ON = {
    "allowed_token_ids": [1, 2, 3],
    "suppress_tokens": [4],
    "bad_words": ["a"],
    "min_tokens": 1,
    "no_repeat_ngram_size": 2,
    "logit_bias": {5: 1.0},
    "presence_penalty": 0.5,
    "dry_multiplier": 0.8,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_a": 0.1,
    "top_n_sigma": 1.0,
    "p_less": True,
    "tfs": 0.9,
    "typical_p": 0.9,
    "top_h": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "xtc_probability": 0.5,
    "mirostat": 2,
}
ORDER = [
    "allowed_token_ids", "suppress_tokens", "bad_words", "min_tokens", "no_repeat_ngram", "logit_bias", "penalties",
    "dry", "temperature", "top_k", "top_p", "min_p", "top_a", "top_n_sigma", "p_less", "tfs", "typical_p", "top_h",
    "epsilon_cutoff", "eta_cutoff", "xtc", "mirostat",
]  # fmt: skip
# Fields of the proto that are no knobs of a stage.
NO_STAGE = {"seed", "stages", "order", "use_model_defaults", "guidance_scale"}

Resolve = Callable[..., SamplingChain]


def names(chain: SamplingChain) -> list[str]:
    """Names of the stages in the order in which they run."""
    return [stage.name for stage in chain.stages]


def refusal(resolve: Resolve, **knobs: object) -> dict[str, str]:
    """The messages of a request that must be refused, by field."""
    with pytest.raises(InvalidRequestError) as caught:
        resolve(**knobs)
    return {violation.field: violation.message for violation in caught.value.violations}


def test_default_order(resolve: Resolve):
    """Masks, penalties, temperature, top_k, top_p, min_p, other filters, select, however the knobs come."""
    assert names(resolve(**ON)) == ORDER
    assert names(resolve(**dict(reversed(ON.items())))) == ORDER


def test_every_default_is_off(resolve: Resolve):
    """Each knob takes its default, said aloud or found in the model's defaults, and that makes no stage."""
    defaults = resolve().knobs
    assert names(resolve(**defaults)) == ["categorical"]
    assert resolve(defaults=defaults).knobs == defaults


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("top_k", -1), ("top_n_sigma", -1), ("top_n_sigma", -1.0), ("tfs", 0), ("adaptive_target", -1),
        ("bad_words", []), ("bad_words", ()), ("logit_bias", {}), ("min_p", 0), ("repetition_penalty", 1),
        ("p_less", False),
    ],
)  # fmt: skip
def test_other_ways_to_say_off(resolve: Resolve, knob: str, value: object):
    """Zero, minus one or an empty list where the field says so; they beat a default that is on."""
    on = ON | {"adaptive_target": 0.5, "repetition_penalty": 1.2}
    assert names(resolve(defaults={knob: on[knob]}, **{knob: value})) == ["categorical"]


def test_a_knob_that_only_adjusts_turns_nothing_on(resolve: Resolve):
    """A threshold without a probability is checked, and no more."""
    knobs = {"xtc_threshold": 0.2, "dry_base": 2.0, "mirostat_tau": 3.0, "dry_sequence_breakers": ["x"]}
    assert names(resolve(**knobs)) == ["categorical"]
    assert "at least 0 and at most 0.5" in refusal(resolve, xtc_threshold=0.6)["xtc_threshold"]


def test_knobs_of_one_stage_meet(resolve: Resolve):
    """The request's and the defaults' make one stage, the request's winning."""
    chain = resolve(defaults={"xtc_threshold": 0.2, "xtc_probability": 0.1}, xtc_probability=0.4)
    assert chain.stages[0].stage.model_dump() == {"xtc_probability": 0.4, "xtc_threshold": 0.2}
    assert chain.knobs["xtc_threshold"] == 0.2


def test_zero_temperature_leaves_masks_and_penalties(resolve: Resolve):
    """Greedy skips whatever cannot matter, Mirostat included."""
    assert names(resolve(**ON | {"temperature": 0})) == [*ORDER[:8], "greedy"]


def test_two_selects_are_refused(resolve: Resolve):
    """Mirostat and Adaptive-P both choose the token."""
    fields = refusal(resolve, mirostat=2, adaptive_target=0.5)
    assert "second select" in fields["adaptive_target"]


def test_order_names_the_new_stages(resolve: Resolve):
    """Temperature can come last, as in llama.cpp."""
    order = ["penalties", "dry", "min_p", "xtc", "temperature"]
    on = ("presence_penalty", "dry_multiplier", "min_p", "xtc_probability", "temperature")
    assert names(resolve(order=order, **{name: ON[name] for name in on})) == [*order, "categorical"]


def test_proto_has_every_knob(resolve: Resolve):
    """SamplingOptions and the registry name the same knobs; min_tokens is with the stopping options."""
    fields = set(SamplingOptions.DESCRIPTOR.fields_by_name)
    assert set(resolve().knobs) - {"min_tokens"} == fields - NO_STAGE
    assert all(field.has_presence or field.is_repeated for field in SamplingOptions.DESCRIPTOR.fields)


FRACTIONS = ("min_p", "top_a", "top_h", "epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat_eta")
WRONG_NUMBERS = [NAN, INF, -INF, True, "0.5", np.float32(0.5), 10**30, [0.5]]
NUMBERS = {
    **{name: [-0.1, 1.1] for name in FRACTIONS},
    "typical_p": [0, 0.0, 1.1],
    "tfs": [-0.1, 1.1],
    "top_n_sigma": [-0.5, -2],
    "xtc_threshold": [-0.1, 0.51],
    "dynatemp_range": [-0.1],
    "dynatemp_exponent": [-1, 101],
    "repetition_penalty": [0, -1.0],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "dry_multiplier": [-0.1, 1001],
    "dry_base": [0.9, 101],
    "mirostat_tau": [-1, 101],
    "adaptive_target": [-0.5, 1.1],
    "adaptive_decay": [-0.1, 1.0],
}
WHOLE_NUMBERS = {
    "dry_allowed_length": [0, -1, 2**31],
    "no_repeat_ngram_size": [-1, 2**31],
    "mirostat": [-1, 3],
}


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        *((knob, value) for knob, values in NUMBERS.items() for value in [*WRONG_NUMBERS, *values]),
        *((knob, value) for knob, values in WHOLE_NUMBERS.items() for value in [*WRONG_NUMBERS, 2.0, *values]),
        ("mirostat", np.int64(2)),
    ],
)
def test_wrong_numbers(resolve: Resolve, knob: str, value: object):
    """NaN, infinities, other types, NumPy's scalars and values out of range: field, range and value are named."""
    (message,) = refusal(resolve, **{knob: value}).values()
    assert ("must be a number " if knob in NUMBERS else "must be an integer ") in message
    assert "received" in message


@pytest.mark.parametrize(
    ("knobs", "field", "message"),
    [
        ({"p_less": 1}, "p_less", "received 1"),
        ({"p_less": "true"}, "p_less", "received 'true'"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"allowed_token_ids": [8]}, "allowed_token_ids[0]", "must be a token id from 0 to 7; received 8"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]", "received -1"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids[0]", "received 1.0"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]", "received True"),
        ({"allowed_token_ids": 3}, "allowed_token_ids", "received 3"),
        ({"allowed_token_ids": np.array([3])}, "allowed_token_ids", "is no plain value"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens[0]", "received 'a'"),
        ({"suppress_tokens": [1, 2**40]}, "suppress_tokens[1]", "received 1099511627776"),
        ({"suppress_tokens": [np.int64(1)]}, "suppress_tokens[0]", "1 (numpy.int64)"),
        ({"suppress_tokens": list(range(8))}, "suppress_tokens", "must leave a token; received all 8"),
        ({"logit_bias": {8: 1.0}}, "logit_bias.8", "must be a token id from 0 to 7; received 8"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.-1.[key]", "received '-1'"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias.x.[key]", "valid integer"),
        ({"logit_bias": {1: NAN}}, "logit_bias.1", "nan is no plain value"),
        ({"logit_bias": {1: -INF}}, "logit_bias.1", "-inf is no plain value"),
        ({"logit_bias": {1: 101}}, "logit_bias.1", "less than or equal to 100; received 101"),
        ({"logit_bias": {1: True}}, "logit_bias.1", "received True"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias.1.5", "is no plain value"),
        ({"logit_bias": [1]}, "logit_bias", "received [1]"),
        ({"bad_words": "a"}, "bad_words", "received 'a'"),
        ({"bad_words": ["a", ""]}, "bad_words[1]", "at least 1 character; received ''"),
        ({"bad_words": ["a", 3]}, "bad_words[1]", "received 3"),
        ({"bad_words": ["\ud800"]}, "bad_words[0]", "is no plain value"),
        ({"bad_words": ["x" * 5000]}, "bad_words[0]", "at most 1024 characters"),
        ({"bad_words": ["x"] * 20_000}, "bad_words", "at most 10000 items"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids[0]", "at least 1 item"),
        ({"bad_words_token_ids": [1]}, "bad_words_token_ids[0]", "received 1"),
        ({"bad_words_token_ids": [[1], [2, 9]]}, "bad_words_token_ids[1][1]", "from 0 to 7; received 9"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", "at least 1 character"),
        ({"dry_multiplier": 1.0, "dry_sequence_breaker_ids": [9]}, "dry_sequence_breaker_ids[0]", "received 9"),
    ],
)
def test_wrong_lists(resolve: Resolve, knobs: dict, field: str, message: str):
    """The place in the list, what is expected and what came."""
    fields = refusal(resolve, **knobs)
    assert message in fields[field]
    assert "preset" not in fields[field]


def test_a_named_stage_is_refused_at_its_parameters(resolve: Resolve):
    """The path of a stage in `stages` leads to the value."""
    fields = refusal(resolve, stages=[StageSpec("suppress_tokens", {"suppress_tokens": [1, 9]})])
    assert list(fields) == ["stages[0].parameters.suppress_tokens[1]"]


def test_a_long_wrong_list_is_told_briefly(resolve: Resolve):
    """A hundred thousand wrong ids are not a hundred thousand messages."""
    assert len(refusal(resolve, suppress_tokens=[-1] * 100_000)) == 16
    assert len(refusal(resolve, suppress_tokens=[NAN] * 100_000)) == 16


def test_a_ban_that_leaves_nothing_fails_the_request(resolve: Resolve):
    """Contradicting lists end in an error that names the stage, never in token 0."""
    chain = resolve(allowed_token_ids=[3], suppress_tokens=[3])
    (outcome,) = sample_rows([chain.begin([1], seed=0)], np.zeros((1, 8), dtype=np.float32))
    assert "'suppress_tokens'" in str(outcome)
    assert "no token is left to choose" in str(outcome)


def test_every_stage_in_one_chain(resolve: Resolve):
    """All of them together draw token after token, the same for the same seed."""
    chain = resolve(vocab_size=200, **ON | {"allowed_token_ids": list(range(150)), "top_k": 50})
    logits = np.random.default_rng(0).standard_normal((1, 200)).astype(np.float32)

    def tokens() -> list[int]:
        sampler, ids = chain.begin([1, 2, 3], seed=5, eos_ids=[0]), []
        for _ in range(30):
            (sample,) = sample_rows([sampler], logits)
            sampler.accept(sample.token_id)
            ids.append(sample.token_id)
        return ids

    assert tokens() == tokens()
    assert len({tuple(pair) for pair in zip(tokens(), tokens()[1:], strict=False)}) == 29


fractions = st.floats(1e-6, 1)
knob_sets = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 5),
        "dynatemp_range": st.floats(0, 3),
        "top_k": st.integers(-1, 50),
        **dict.fromkeys(("top_p", "typical_p", "tfs", "top_h", "min_p", "top_a"), fractions),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "xtc_probability"), fractions),
        "xtc_threshold": st.floats(0, 0.5),
        "top_n_sigma": st.floats(0.01, 10),
        "p_less": st.booleans(),
        "repetition_penalty": st.floats(0.01, 10),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "dry_multiplier": st.floats(0, 1000),
        "dry_base": st.floats(1, 100),
        "no_repeat_ngram_size": st.integers(0, 3),
        "min_tokens": st.integers(0, 9),
        "logit_bias": st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=5),
        "mirostat": st.integers(0, 2),
        "mirostat_tau": st.floats(0, 100),
    },
)
rows = st.lists(st.sampled_from([-INF, -3e38, -50, 0, 0.5, 1, 1, 2, 60, 3e38]), min_size=29, max_size=29)


@given(knobs=knob_sets, row=rows, seed=st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chain_draws_a_possible_token(resolve: Resolve, knobs: dict, row: list[float], seed: int):
    """Whatever is combined on whatever row, token after token: one that is not masked, and the same when run again."""
    chain, logits = resolve(vocab_size=30, **knobs), np.array([[*row, 1]], dtype=np.float32)
    sampler = chain.begin([1, 2, 1], seed=seed, eos_ids=[0])
    for _ in range(4):
        (first,), (again,) = sample_rows([sampler], logits), sample_rows([sampler], logits)
        assert first == again
        assert logits[0, first.token_id] > -INF
        sampler.accept(first.token_id)


def cells(knob: str) -> list[str]:
    """The README's row of a knob: range, default and off, named."""
    readme = (Path(__file__).parents[2] / "plugins" / "samplers" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if re.search(rf"^\| (`\w+`)? ?\| `{knob}` \|", line)]
    return [cell.strip() for cell in row.split("|")[3:6]]


def test_readme_has_every_knob(manager_of):
    """The tables of plugins/samplers/README.md tell the off values, and what a named stage takes."""
    for knob in manager_of().registry.knobs.values():
        _, off, named = cells(knob.name)
        default = knob.entry.cls.model_fields[knob.name].get_default()
        if isinstance(default, int | float):
            assert named == (str(default).lower() if isinstance(default, bool) else f"{default:g}"), knob.name
            shown = [str(one).lower() if isinstance(one, bool) else f"{one:g}" for one in knob.off]
            assert off == (", ".join(shown) if knob.off else f"adjusts: {default:g}"), knob.name
