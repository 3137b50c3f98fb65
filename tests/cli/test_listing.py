"""`treadle models`, `plugins`, `pull`, `--version` and `--help`."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from treadle_server.cli.output import write_table

Run = Callable[..., Any]  # the fixture `treadle`


def test_a_pulled_model_is_listed_and_found_by_name(
    treadle: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`treadle pull` stores a folder; `models` lists it and `generate` finds it."""
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    pulled = json.loads(treadle("pull", tiny_folder, "--name", "pulled", "--json").stdout)
    listed = json.loads(treadle("models", "--json").stdout)
    assert pulled in listed
    assert Path(pulled["folder"]).is_dir()
    assert "pulled\t" in treadle("models").stdout
    done = treadle("generate", "the", "--model", "pulled", "--max-tokens", "2", "--json")
    assert json.loads(done.stdout)["prompt_info"]["model"] == "pulled"


def test_a_card_cannot_give_a_terminal_orders(
    treadle: Run, on_terminal: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences in the licence of somebody's card are shown by no command."""
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path / "home"))
    folder = shutil.copytree(tiny_folder, tmp_path / "tiny")
    (folder / "README.md").write_text("---\nlicense: mit\x1b]0;owned\x07\x9b2J\n---\n", encoding="utf-8")
    shown = [on_terminal("pull", folder), on_terminal("models"), treadle("models").stdout]
    shown += [treadle("models", "--json").stdout, treadle("pull", folder, "--json").stdout]
    for text in shown:
        assert "mit" in text
        assert not any(order in text for order in ("\x1b]0", "\x07", "\x9b"))


def test_a_server_lists_its_models(treadle: Run, target: str) -> None:
    """`models --target` lists what that server serves."""
    (model,) = json.loads(treadle("models", "--target", target, "--json").stdout)
    assert (model["name"], model["context_length"], model["has_chat_template"]) == ("tiny", 128, True)
    row = treadle("models", "--target", target).stdout.split()
    assert (row[0], row[-2:]) == ("tiny", [model["dtype"], model["backend"]])


def test_an_unknown_source_is_named(treadle: Run) -> None:
    """`pull` exits with 1 and lists the kinds of sources."""
    done = treadle("pull", "nowhere", status=1)
    assert "nowhere" in done.stderr
    assert "pypi:" in done.stderr


def test_plugins_lists_stages_and_reasons(treadle: Run, plugin_dir: Path, tmp_path: Path) -> None:
    """Active plugins come with their stages, failed ones with the reason, blocked ones as such."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')")
    options = ("--plugin-dir", plugin_dir, "--plugin-dir", tmp_path)
    listed = json.loads(treadle("plugins", *options, "--json").stdout)
    found = {plugin["name"]: plugin for plugin in listed}
    assert found["samplers"]["version"] == metadata.version("treadle-samplers")
    assert "top_k" in found["samplers"]["stages"]
    assert (found["slow"]["status"], found["slow"]["stages"]) == ("active", ["slow"])
    assert found["broken"]["status"] == "failed"
    assert "no luck" in found["broken"]["reason"]
    assert "slow\t" in treadle("plugins", *options, "--no-plugin", "slow").stdout


def test_a_reason_of_several_lines_stays_in_its_cell(treadle: Run, tmp_path: Path) -> None:
    """A row of a table is a line, and a tab ends a cell, whatever a plugin's error says."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\n\\tluck\\x1b[31m today')")
    lines = treadle("plugins", "--plugin-dir", tmp_path).stdout.splitlines()
    (cells,) = (line.split("\t") for line in lines if line.startswith("broken\t"))
    assert len(cells) == 6
    assert "no luck" in cells[-1]
    assert "\x1b" not in cells[-1]


def test_a_narrow_terminal_breaks_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table for 80 columns only the last column's words may be cut."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no escapes
    names = ["repetition_penalty,", "frequency_penalty,", "top_k"]
    row = ["samplers", "treadle-samplers", "0.1.0", "not installed", " ".join(names) + " "]
    reasons = ["", "it needs treadle-samplers[grammar]"]
    columns = ["plugin", "distribution", "version", "status", "brings", "reason"]
    for reason in reasons:
        write_table(columns, [[*row[:4], row[4] * 9, reason], [*row, reason]])
    words = screen.getvalue().split()
    assert "…" not in screen.getvalue()
    assert {"samplers", "treadle-samplers", "0.1.0", *names} <= {*words}
    assert max(map(len, screen.getvalue().splitlines())) <= 80


def test_what_target_means_is_told(treadle: Run) -> None:
    """For lists, no server runs without --target, and the help says so."""
    for command in ("models", "plugins"):
        shown = " ".join(treadle(command, "--help").stdout.replace("│", " ").split())
        assert "without it, what is here" in shown
        assert "in this process." not in shown


def test_a_server_lists_its_plugins(treadle: Run, target: str) -> None:
    """`plugins --target` lists what that server has, in the same form."""
    listed = json.loads(treadle("plugins", "--target", target, "--json").stdout)
    found = {plugin["name"]: plugin["status"] for plugin in listed}
    assert found["samplers"] == found["slow"] == "active"
    assert "cross_entropy" in {loss for plugin in listed for loss in plugin["losses"]}
    assert "--target" in treadle("plugins", "--target", target, "--plugin-dir", ".", status=2).stderr


def test_the_version_is_told(treadle: Run) -> None:
    """`--version` writes the server's version."""
    assert treadle("--version").stdout == f"treadle {metadata.version('treadle-server')}\n"


def test_help_does_not_wait_for_heavy_modules() -> None:
    """Making the command line imports neither NumPy nor gRPC nor pydantic."""
    code = (
        "import sys, treadle_server.cli.app as app; app.make_app();"
        "print({'numpy', 'grpc', 'pydantic', 'tokenizers', 'gguf', 'treadle_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
