"""The README's own examples, taken from it and run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

README = Path(__file__).parents[2] / "README.md"
TARGET = "127.0.0.1:7433"


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def block(language: str, mark: str) -> str:
    """Return the one block that holds `mark`."""
    found = [text for text in blocks(language) if mark in text]
    assert len(found) == 1, f"{len(found)} blocks hold {mark!r}"
    return found[0]


def environment() -> dict[str, str]:
    """Return the environment with this venv's commands first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(command: list[str], folder: Path, text: str = "") -> str:
    """Run a command that must succeed, and return what it prints."""
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, check=False, env=environment(), timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[str]:
    """Run the README's own `treadle serve` on a free port; return the address."""
    command = block("bash", "treadle serve").split()
    command += ["--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0


def test_pull_and_chat_hold_a_conversation(smollm2: Path, tmp_path: Path) -> None:
    """The pull-and-chat line answers two turns, the second with the first in mind."""
    command = block("bash", "treadle pull")
    turns = "What is the capital of France?\nAnd of Italy?\n"
    answers = run(["bash", "-c", command.strip() + " --temperature 0 --max-tokens 24"], tmp_path, turns)
    assert "Paris" in answers
    assert "Rome" in answers


def test_streaming_script_works(served: str, tmp_path: Path) -> None:
    """The ten-line script streams a text and prints an answer."""
    script = block("python", "client.stream").replace(TARGET, served)
    assert len(run([sys.executable, "-c", script], tmp_path).strip()) > 20


def test_in_process_script_works(smollm2: Path, tmp_path: Path) -> None:
    """The script without a server gives logits of the printed shape."""
    script = block("python", "LanguageModel.load")
    assert run([sys.executable, "-c", script], tmp_path).startswith("(3, 49152)\n")


def test_own_sampler_changes_the_output(smollm2: Path, tmp_path: Path) -> None:
    """The README's sampler, saved as it says and named on the command line, changes the text."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "shout.py").write_text(block("python", "class Shout"))
    command = block("bash", "--plugin-dir").strip() + " --temperature 0"
    shouted = run(["bash", "-c", command], tmp_path)
    plain = run(["bash", "-c", re.sub(r"--stage '.*?'", "", command)], tmp_path)
    assert shouted != plain
    assert sum(map(str.isupper, shouted)) > sum(map(str.isupper, plain))
