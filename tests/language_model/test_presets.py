"""Presets lie within the handworked document's table of settings, and work in process."""

from __future__ import annotations

import pytest
from treadle_server import LanguageModel
from treadle_server.explain.document import SETTINGS, Setting
from treadle_server.language_model.presets import PRESETS


def test_every_task_of_the_table_has_a_preset() -> None:
    """Eight tasks, eight presets, in the table's order."""
    assert [setting.preset for setting in SETTINGS] == list(PRESETS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.preset)
def test_each_value_lies_within_the_table(setting: Setting) -> None:
    """The temperature is in the range that the table allows; top-p and top-k are its values."""
    preset = PRESETS[setting.preset]
    low, high = setting.temperature
    assert low <= preset["temperature"] <= high
    assert (preset["top_p"], preset["top_k"]) == (setting.top_p, setting.top_k)
    assert set(preset) == {"temperature", "top_p", "top_k"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_request_takes_a_preset(model: LanguageModel, name: str) -> None:
    """The knobs in force are the preset's."""
    knobs = model.generate("the", preset=name, max_tokens=1).prompt_info.knobs
    assert {knob: knobs[knob] for knob in PRESETS[name]} == dict(PRESETS[name])


@pytest.mark.parametrize("name", ["code", "maths"])
def test_exact_tasks_take_the_likeliest_token(model: LanguageModel, name: str) -> None:
    """With top_k=1 a preset generates what greedy does, whatever the seed."""
    texts = {model.generate("the cat", preset=name, seed=seed, max_tokens=8).text for seed in range(4)}
    assert texts == {model.generate("the cat", temperature=0, max_tokens=8).text}
