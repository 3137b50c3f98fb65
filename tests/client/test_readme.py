"""The examples and names in the client's README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import treadle_client
from treadle_server.config import ServerConfig
from treadle_server.language_model.presets import PRESETS
from treadle_server.service.embedded import embedded_server

README = (Path(__file__).parents[2] / "clients" / "python" / "README.md").read_text("utf-8")
# The one with an address and certificates that a reader has to fill in is left out, and the one that needs a trainer.
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = [text for text in BLOCKS if "example.org" not in text and "TrainingClient" not in text]

RESULTS = re.findall(r"^\| (`[A-Z]\w+` \| `[a-z].*) \|$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def real_target(tiny_folder: Path) -> Iterator[str]:
    """Address of a real server of a tiny model."""
    with embedded_server([str(tiny_folder)], ServerConfig(port=0)) as address:
        yield address


def test_the_examples_run_in_order(real_target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted one after the other they work as printed but for the address, with the names of those before."""
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(example.replace("127.0.0.1:7433", real_target), names)
        assert capsys.readouterr().out or "print" not in example
    names["client"].close()


def test_the_readme_has_the_examples() -> None:
    """Streams, both clients, and one example each of logprobs, stop, n and score."""
    assert len(RESULTS) >= 8
    for words in ("logprobs=", "stop=[", "n=3", "client.score(", "client.trace(", "client.preview(", "async for"):
        assert sum(words in example for example in EXAMPLES) == 1, words


@pytest.mark.parametrize("row", RESULTS)
def test_named_fields_exist(row: str) -> None:
    """A row of the table of results names fields that the class has."""
    name, *fields = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row))
    cls: Any = getattr(treadle_client, name)
    assert [field for field in fields if not hasattr(cls, field)] == []


def test_all_presets_are_named() -> None:
    """The list of presets is the server's."""
    assert [name for name in PRESETS if f"`{name}`" not in README] == []
