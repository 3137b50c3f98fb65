"""`check_stage` lets good stages through and names the rule that a bad one breaks."""

import time
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from treadle_plugin_api import Field, Knob, PrivateAttr, SamplingContext, Select, Stage
from treadle_plugin_api.contract import class_problems
from treadle_plugin_api.testing import check_stage
from treadle_samplers.allowed_token_ids import AllowedTokenIds
from treadle_samplers.suppress_tokens import SuppressTokens


class Shift(Stage):
    """Add a number to every logit."""

    name = "shift"
    kind = "transform"
    api_version = 1
    argmax_invariant = True

    amount: float = Field(default=1.0, ge=-10, le=10, description="what to add")

    def apply(self, logits, context, state=None):
        """The sum."""
        return np.add(logits, np.float32(self.amount), out=context.empty())


class Counting(Stage):
    """Mask the tokens accepted so far: a stage with state and a batch method."""

    name = "counting"
    kind = "mask"

    def start(self, context: SamplingContext) -> set[int]:
        """The set of tokens seen."""
        return set()

    def accept(self, state: set[int], token_id: int) -> None:
        """Remember the token."""
        state.add(token_id)

    def apply(self, logits, context, state=None):
        """Mask what was seen, unless that leaves nothing."""
        out = logits.copy()
        out[[token for token in state if token < len(logits)]] = -np.inf
        return out if out.max() > -np.inf else logits

    @classmethod
    def apply_batch(cls, stages, logits, contexts, states):
        """Row by row, into one array."""
        out = np.empty_like(logits)
        for i, stage in enumerate(stages):
            out[i] = stage.apply(logits[i], contexts[i], states[i])
        return out


class Checked(Stage):
    """Needs a vocabulary of ten; keeps what its check prepared."""

    name = "checked"
    kind = "mask"
    _seen: int = PrivateAttr(default=0)

    def check(self, model_info):
        """Prepare."""
        if model_info.vocab_size < 10:
            raise ValueError("needs a vocabulary of ten")
        self._seen = model_info.vocab_size

    def apply(self, logits, context, state=None):
        """Fails unless prepared for this vocabulary."""
        assert self._seen == len(logits)
        return logits


class Second(Select):
    """Choose the second most likely token, or the only one."""

    name = "second"

    def apply(self, logits, context, state=None):
        """Its id."""
        order = np.argsort(-logits, kind="stable")
        return int(order[1]) if len(order) > 1 and logits[order[1]] > -np.inf else int(order[0])


@pytest.mark.parametrize("cls", [Shift, Counting, Checked, Second])
def test_good_stages_pass(cls: type):
    """Stages that keep the contract pass with their defaults."""
    check_stage(cls)


def broken(body: Any, base: type = Stage, **attributes: Any) -> type:
    """A stage class whose `apply` is `body`."""
    attributes = {"name": "bad", "kind": "select" if base is Select else "mask", **attributes}
    return type("Bad", (base,), {"__doc__": "A bad stage.", "__module__": __name__, "apply": body, **attributes})


class Notes:
    """Hidden state that no stage may have."""

    calls = 0

    @classmethod
    def count(cls) -> int:
        """One more."""
        cls.calls += 1
        return cls.calls


def in_place(self, logits, context, state=None):
    """Writes to its input."""
    logits[0] = 0
    return logits


def sleeping(self, logits, context, state=None):
    """Takes its time on long rows."""
    if len(logits) > 1000:
        time.sleep(0.06)
    return logits


def drawing(self, state, token_id):
    """Advances by chance."""
    state.append(np.random.default_rng().random())


def least_likely_of_prompt(self, logits, context, state=None):
    """Moves tokens of the prompt to the end."""
    out = logits.copy()
    out[context.prompt_ids[context.prompt_ids < len(logits)]] -= np.float32(10)
    return out


def scaled_by_first(cls, stages, logits, contexts, states):
    """Gives every row the first one's parameters."""
    return logits + np.float32(stages[0].amount)


def only_most_likely_of_batch(cls, stages, logits, contexts, states):
    """Compares rows with each other."""
    return np.where(logits == logits.max(), logits, -np.inf)


def spoiling_batch(cls, stages, logits, contexts, states):
    """Advances state, which only accept may."""
    for context, state in zip(contexts, states, strict=True):
        state.append(1)
        context.uniform()
    return logits


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (broken(lambda self, logits, context, state=None: logits.astype(np.float64)), "not float32"),
        (broken(lambda self, logits, context, state=None: logits[:-1]), "not float32"),
        (broken(lambda self, logits, context, state=None: logits.tolist()), "not a NumPy array"),
        (broken(lambda self, logits, context, state=None: logits - np.inf), "left no token"),
        (broken(lambda self, logits, context, state=None: np.where(logits > 3, np.nan, logits)), "returned NaN"),
        (broken(lambda self, logits, context, state=None: np.where(logits > 3, np.inf, logits)), r"returned \+inf"),
        (broken(lambda self, logits, context, state=None: np.maximum(logits, np.float32(-5))), "possible again"),
        (broken(lambda self, logits, context, state=None: logits + np.float32(Notes.count())), "applied twice"),
        (broken(lambda self, logits, context, state=None: -logits, argmax_invariant=True), "possible again|argmax"),
        (broken(in_place), "read-only"),
        (broken(lambda self, logits, context, state=None: 10**6, Select), "outside the vocabulary"),
        (broken(lambda self, logits, context, state=None: 0, Select), "masked token"),
        (broken(lambda self, logits, context, state=None: 0.0, Select), "not a token id"),
        (broken(lambda self, logits, context, state=None: True, Select), "not a token id"),
        (
            broken(
                lambda self, logits, context, state=None: logits,
                apply_batch=classmethod(only_most_likely_of_batch),
            ),
            "than alone",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits + np.float32(len(state)),
                start=lambda self, context: [],
                accept=lambda self, state, token_id: state.append(token_id),
                clone=lambda self, state: state,
            ),
            "a clone changes",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits + np.float32(len(state[0])),
                start=lambda self, context: ([], []),
                accept=lambda self, state, token_id: [tokens.append(token_id) for tokens in state],
                clone=lambda self, state: (list(state[0]), state[0]),
            ),
            "an original changes when its clone",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits + np.float32(len(state)),
                start=lambda self, context: [],
                accept=lambda self, state, token_id: state.append(token_id),
                clone=lambda self, state: [],
            ),
            "a clone gives another result",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits,
                apply_batch=classmethod(lambda cls, stages, logits, contexts, states: list(logits)),
            ),
            "must return an array of float32, but returns a list",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits,
                apply_batch=classmethod(lambda cls, stages, logits, contexts, states: logits.astype(np.float64)),
            ),
            "must return an array of float32, but returns an array of float64",
        ),
        (
            broken(
                lambda self, logits, context, state=None: logits + np.float32(sum(state)),
                start=lambda self, context: [],
                accept=drawing,
                clone=lambda self, state: list(state),
            ),
            "accept may not draw",
        ),
        (
            broken(least_likely_of_prompt, argmax_invariant=True),
            "prompt's tokens ahead: the largest token is another one",
        ),
        (broken(lambda self, logits, context, state=None: {}[len(logits)]), "raised KeyError"),
        (broken(sleeping), "on a row of 152000 tokens: takes .* over 0.05 s"),
        (
            broken(
                lambda self, logits, context, state=None: logits + np.float32(len(state)),
                start=lambda self, context: [],
                apply_batch=classmethod(spoiling_batch),
            ),
            "than alone|half way",
        ),
    ],
)
def test_bad_stages_are_named(cls: type, reason: str):
    """Each broken rule is found, and the message says which."""
    with pytest.raises((AssertionError, ValueError), match=reason):
        check_stage(cls)


def test_rows_have_their_own_parameters():
    """A batch that treats all rows as its first one is found where parameters differ from the defaults."""
    mixing = type("Mixing", (Shift,), {"__doc__": "Mixes.", "apply_batch": classmethod(scaled_by_first)})
    with pytest.raises(AssertionError, match="than alone"):
        check_stage(mixing, amount=2.0)


@pytest.mark.parametrize(
    "stage", [(SuppressTokens, {"suppress_tokens": [5]}), (AllowedTokenIds, {"allowed_token_ids": [0]})]
)
def test_ban_that_leaves_nothing_may_raise(stage: tuple[type[Stage], dict[str, Any]]):
    """A mask may refuse a row on which it would leave no token."""
    cls, parameters = stage
    check_stage(cls, **parameters)


class Wanting(Stage):
    """Needs a word that no model of the kit has; its default too."""

    name = "wanting"
    kind = "mask"
    word: str = Field(default="", description="a word")

    def check(self, model_info):
        """Look for it."""
        raise ValueError(f"no token {self.word!r}")

    def apply(self, logits, context, state=None):
        """Nothing."""
        return logits


def test_parameters_that_no_model_fits_test_nothing():
    """Refused defaults are a stage's right; refused parameters of a test are its author's mistake."""
    check_stage(Wanting)
    with pytest.raises(AssertionError, match="was not tested: its check refuses every model, no token 'x'"):
        check_stage(Wanting, word="x")


class Undescribed(Stage):
    """A parameter without description or default."""

    name = "undescribed"
    kind = "mask"
    amount: int

    def apply(self, logits, context, state=None):
        """Nothing."""
        return logits


def test_kit_wants_descriptions_and_defaults():
    """The kit is stricter than the server: what users see must be there."""
    with pytest.raises(AssertionError, match=r"no description.*no default"):
        check_stage(Undescribed, amount=1)


def with_attributes(**attributes: Any) -> type:
    """A passable stage with other class attributes."""
    return broken(lambda self, logits, context, state=None: logits, **attributes)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (int, "not a subclass"),
        (Stage, "not a subclass"),
        ("text", "not a subclass"),
        (with_attributes(name="Bad Name"), "name is 'Bad Name'"),
        (with_attributes(name=3), "name is 3"),
        (with_attributes(kind="sort"), "kind is 'sort'"),
        (with_attributes(kind="select"), "kind is 'select'"),
        (with_attributes(api_version=2), "api_version is 2; this treadle runs 1"),
        (with_attributes(api_version=True), "api_version is True"),
        (with_attributes(argmax_invariant=1), "argmax_invariant is 1"),
        (with_attributes(apply=lambda self, logits: logits), "apply cannot be called"),
        (with_attributes(accept=lambda self, token_id: None), "accept cannot be called"),
        (type("NoApply", (Stage,), {"name": "no", "kind": "mask", "__module__": __name__}), "defines no apply"),
    ],
)
def test_class_problems(cls: Any, reason: str):
    """What cannot be registered, and why."""
    assert any(reason in problem for problem in class_problems(cls))


class BadDefault(Shift):
    """A default outside its own range."""

    name = "bad_default"
    extra: int = Field(default=5, le=3, description="x")


class LooseConfig(Shift):
    """Takes any parameter."""

    name = "loose"
    model_config: ClassVar = {"extra": "allow"}


@pytest.mark.filterwarnings("ignore:Field name")
def test_field_problems():
    """Defaults out of range, a loosened config, and fields that hide methods are found."""

    class Hiding(Shift):
        """A field called like a method."""

        name = "hiding"
        start: int = Field(default=1, description="x")

    assert "not usable" in class_problems(BadDefault)[0]
    assert "model_config changes extra" in class_problems(LooseConfig)[0]
    assert any("'start' hides a method" in problem for problem in class_problems(Hiding))


def test_knob_is_metadata_only():
    """A knob marker changes nothing about the field's own validation."""

    class Marked(Shift):
        """A marked field."""

        name = "marked"
        size: Annotated[int, Knob(off=(0,))] = Field(default=1, ge=1, description="x")

    assert Marked(size=3).size == 3
    assert class_problems(Marked) == []
