"""What the READMEs say of training by RPC."""

from __future__ import annotations

import re
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
TRAINING = (ROOT / "server" / "src" / "treadle_server" / "training" / "README.md").read_text("utf-8")


def test_the_clients_example_runs(
    process: Run, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed but for the address, beside a server, whose new version it prints; it needs a checkpoint root."""
    example = next(text for text in re.findall(r"```python\n(.*?)```", CLIENT, re.DOTALL) if "TrainingClient" in text)
    options = ["--with-trainer", "--trainer-port", "0", f"--trainer-option=--checkpoint-root={tmp_path}"]
    with process("serve", f"tiny={tiny_folder}", *options) as (_, told):
        exec(example.replace("127.0.0.1:7434", told["trainer"]), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "2"]


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
