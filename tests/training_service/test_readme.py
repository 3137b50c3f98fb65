"""What the READMEs say of training by RPC."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from treadle_client import TrainingClient
from treadle_server.service import status

Run = Callable[..., AbstractContextManager[Any]]
ROOT = Path(__file__).parents[2]
CLIENT = (ROOT / "clients" / "python" / "README.md").read_text("utf-8")
PLUGINS = (ROOT / "plugins" / "README.md").read_text("utf-8")
TRAINING = (ROOT / "server" / "src" / "treadle_server" / "training" / "README.md").read_text("utf-8")


def block(page: str, language: str, mark: str) -> str:
    """Return the one code block of a language that holds `mark`."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if mark in text)
    return str(found)


def arguments(line: str) -> list[str]:
    """Return the arguments of a line that begins with `treadle`."""
    return shlex.split(line.replace("\\\n", ""))[1:]


def test_the_clients_example_runs(
    process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Server and script as printed but for the addresses; the script prints its steps and the server's new version."""
    monkeypatch.chdir(tmp_path)
    example = block(CLIENT, "python", "TrainingClient")
    command = arguments(block(CLIENT, "bash", "--with-trainer"))
    with process(*command, "--trainer-port", "0") as (_, told):
        exec(example.replace("127.0.0.1:7434", told["trainer"]), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "2"]
    assert (tmp_path / "checkpoints" / "tuesday" / "model.safetensors").exists()


def test_a_loss_of_ones_own_by_rpc(
    process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plugins' page: a trainer with the folder `stages`, and a step with its loss and optimizer."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "focal.py").write_text(block(PLUGINS, "python", "treadle_register_losses"), "utf-8")
    monkeypatch.chdir(tmp_path)
    with process(*arguments(block(PLUGINS, "bash", "treadle trainer"))) as (_, told):
        exec(block(PLUGINS, "python", "TrainingClient").replace("127.0.0.1:7434", told["address"]), {})
    assert float(capsys.readouterr().out) > 0


def test_a_server_and_a_trainer_in_two_terminals(process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says but for the addresses; what is published reaches the server."""
    monkeypatch.chdir(tmp_path)
    make, serve = block(TRAINING, "bash", "--model-root").strip().splitlines()
    assert make == "mkdir -p published"
    (tmp_path / "published").mkdir()
    with process(*arguments(serve)) as (_, served):
        train = block(TRAINING, "bash", "--publish-root").replace("127.0.0.1:7433", served["address"])
        with process(*arguments(train)) as (_, told), TrainingClient(told["address"]) as trainer:
            trainer.step(["The cat sat on the mat."], lr=1e-4)
            assert trainer.publish_weights().weight_version == 2


def test_named_methods_exist() -> None:
    """Every method of the table and no other, but for what every client has."""
    table = CLIENT[CLIENT.index("## Training") : CLIENT.index("A row is a text, a list of messages")]
    named = set(re.findall(r"`(\w+)\(", table))
    public = {name for name in vars(TrainingClient) if not name.startswith("_")}
    assert named == public


def test_reasons_are_the_services() -> None:
    """Each status and reason of the table is one that the service sends."""
    rows = re.findall(r"^\| ([A-Z_]+) \| `([A-Z_]+)` \|", TRAINING, re.MULTILINE)
    assert len(rows) >= 8
    assert set(rows) <= {(code.name, reason) for code, reason in status._STATUSES.values()}
