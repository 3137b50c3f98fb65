"""Presets, over the wire and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from treadle_client import Client, InvalidArgumentError
from treadle_server.cli.options import PRESET_NAMES
from treadle_server.language_model.presets import PRESETS

Run = Callable[..., Any]  # the fixture `treadle`


@pytest.mark.parametrize("name", PRESETS)
def test_a_client_names_a_preset(target: str, name: str) -> None:
    """`preset=` sets temperature, top_k and top_p on the server."""
    with Client(target) as client:
        knobs = client.generate("the", preset=name, max_tokens=1).prompt_info.knobs
    assert {knob: knobs[knob] for knob in PRESETS[name]} == pytest.approx(dict(PRESETS[name]))


def test_the_command_line_names_a_preset(treadle: Run, target: str) -> None:
    """`--preset creative` does the same, and a flag beside it wins."""
    options = ("--target", target, "--preset", "creative", "--top-k", "7", "--max-tokens", "1", "--json")
    knobs = json.loads(treadle("generate", "the", *options).stdout)["prompt_info"]["knobs"]
    assert (knobs["temperature"], knobs["top_p"], knobs["top_k"]) == (1.0, 0.95, 7)


def test_the_help_lists_every_preset(treadle: Run) -> None:
    """The names in the help are those of the table, which the command line does not import."""
    assert PRESET_NAMES.split(", ") == list(PRESETS)
    for command in ("generate", "chat"):
        shown = " ".join(treadle(command, "--help").stdout.replace("│", " ").split())
        assert PRESET_NAMES in shown


def test_an_unknown_preset_is_refused_with_the_known_ones(target: str) -> None:
    """The refusal lists every preset."""
    with Client(target) as client, pytest.raises(InvalidArgumentError) as refusal:
        client.generate("the", preset="nope", max_tokens=1)
    assert all(name in str(refusal.value) for name in PRESETS)
