"""The settings of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from treadle_server.errors import ConfigError
from treadle_server.training.train_config import load_train_config, train_config


def test_a_file_sets_and_options_override(tmp_path: Path) -> None:
    """Keys of the TOML file count unless an option says otherwise."""
    path = tmp_path / "train.toml"
    path.write_text('steps = 30\nlr = 1e-3\nbetas = [0.8, 0.9]\nno_decay = ["*norm*"]\n')
    config = load_train_config(path, {"lr": 0.5})
    assert (config.steps, config.lr, config.betas, config.no_decay) == (30, 0.5, (0.8, 0.9), ("*norm*",))
    assert config.num_epochs is None


def test_without_settings_there_is_one_epoch() -> None:
    """Nothing needs to be set."""
    assert train_config({}).num_epochs == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 1}, ["learning_rate", "not permitted"]),
        ({"lr": -1, "betas": [0.9, 1.0]}, ["lr", "greater than or equal to 0, got -1", "betas.1", "less than 1"]),
        ({"lr": float("nan")}, ["lr", "finite"]),
        ({"steps": 0}, ["steps", "greater than or equal to 1, got 0"]),
        ({"schedule": "square"}, ["schedule", "'cosine'", "got 'square'"]),
        ({"steps": 3, "epochs": 3}, ["steps and epochs"]),
        ({"held_out": ["a.txt"], "held_out_fraction": 0.1}, ["held_out and held_out_fraction"]),
        ({"lora_alpha": 3.0}, ["lora_alpha and lora_targets need a lora_rank"]),
        ({"patience": 3}, ["patience needs held_out"]),
        ({"sequence_length": 64, "batch_tokens": 32}, ["sequence_length must be at most batch_tokens (32), but is 64"]),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: list[str]) -> None:
    """Each wrong setting is named with what was given and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        train_config(settings)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("content", [b"steps = ", b"\xff", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """A missing file, one that is no TOML and one that is no text are refused by name."""
    path = tmp_path / "train.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*train\.toml"):
        load_train_config(path)


def test_the_rate_follows_the_schedule() -> None:
    """The rate rises over the warm-up, then falls to the final one at the last step."""
    config = train_config({"lr": 1.0, "warmup_steps": 2, "schedule": "linear", "final_lr": 0.1})
    assert [round(config.learning_rate(step, 6), 4) for step in range(7)] == [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert train_config({"lr": 1.0, "schedule": "constant"}).learning_rate(50, 6) == 1.0
    assert train_config({"lr": 1.0}).learning_rate(3, 6) == pytest.approx(0.5)
