"""The examples of README.md and plugins/README.md, taken from them and run as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
needs_registry = pytest.mark.network

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PLUGINS = ROOT / "plugins" / "README.md"
TARGET = "127.0.0.1:7433"


def block(language: str, mark: str, page: Path = README) -> str:
    """Return the one code block of a language on a page that holds `mark`."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    found = [text for text in blocks if mark in text]
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
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def shell(line: str, folder: Path, text: str = "") -> str:
    """Run a line of shell that must succeed, and return what it prints."""
    return run(["bash", "-c", line.strip()], folder, text)


def save(folder: Path, name: str, text: str) -> None:
    """Save a listing where its page says, below a folder."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[str]:
    """Run the README's own `treadle serve`, on a free port and with JSON to find it; return the address."""
    command = block("bash", "treadle serve smollm2").split()
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


def test_the_first_command_tells_a_story(tmp_path: Path) -> None:
    """Without its `pip install` (tests/packaging runs that) the first line tells a story, the same by seed."""
    install, _, command = block("bash", "pip install .").partition(" && ")
    assert install == "pip install ."
    free, other = (shell(command, tmp_path) for _ in range(2))
    assert free != other
    assert all(len(story.split()) > 5 and story.rstrip().endswith((".", "!", "?", '"')) for story in (free, other))
    seeded = {shell(command.strip() + " --seed 1", tmp_path) for _ in range(2)}
    assert len(seeded) == 1


def test_the_bundled_model_writes_chinese(tmp_path: Path) -> None:
    """The second prompt of the first section goes on in Chinese."""
    command = re.search(r"\(`(treadle generate 小猫)`\)", README.read_text("utf-8"))
    assert command is not None
    assert "。" in shell(command[1], tmp_path)


def test_explain_explains(tmp_path: Path) -> None:
    """`treadle explain` walks through the sentence."""
    assert "老鼠" in shell(block("bash", "treadle explain\n"), tmp_path)


@needs_registry
def test_explain_writes_a_page(smollm2: Path, tmp_path: Path) -> None:
    """The command with --html writes the page that it names."""
    shell(block("bash", 'treadle explain "'), tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text("utf-8")


@needs_registry
def test_pull_and_chat_hold_a_conversation(smollm2: Path, tmp_path: Path) -> None:
    """The pull-and-chat line answers two turns, the second with the first in mind.

    Greedy, so that the answers are always the same, and short.
    """
    turns = "What is the capital of France?\nAnd of Italy?\n"
    answers = shell(block("bash", "treadle pull").strip() + " --temperature 0 --max-tokens 24", tmp_path, turns)
    assert "Paris" in answers
    assert "Rome" in answers


@needs_registry
def test_pull_and_chat_work_as_printed(smollm2: Path, tmp_path: Path) -> None:
    """Without any flag there is an answer, drawn as the preset chat says."""
    assert len(shell(block("bash", "treadle pull"), tmp_path, "Say yes.\n").strip()) > 2


@needs_registry
def test_streaming_script_works(served: str, tmp_path: Path) -> None:
    """The ten-line script streams a text and prints an answer; the port is the free one."""
    script = block("python", "client.stream").replace(TARGET, served)
    assert len(run([sys.executable, "-c", script], tmp_path).strip()) > 20


@needs_registry
def test_training_script_teaches_a_sentence(tmp_path: Path) -> None:
    """The README's training loop changes what the bundled model says."""
    script = block("python", "Trainer.load")
    assert run([sys.executable, "-c", script], tmp_path).splitlines()[-1] == " 爱 我"


def test_a_sentence_is_taught_while_the_server_serves(tmp_path: Path) -> None:
    """The commands of "Train while it serves", on free ports: the published adapter says what it was taught."""
    command = [*shlex.split(block("bash", "--with-trainer")), "--port", "0", "--trainer-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            script = block("python", "TrainingClient")
            script = script.replace(TARGET, told["address"]).replace("127.0.0.1:7434", told["trainer"])
            before, step, after = run([sys.executable, "-c", script], tmp_path).splitlines()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    assert before.startswith("before:")
    assert "tractor" not in before
    assert step.startswith("step 30: loss 0.")
    assert after.startswith("after:   a red tractor to the moon, and the mouse waved. (trained, version 1)")


def test_files_are_trained_on(tmp_path: Path) -> None:
    """`treadle train` leaves a folder that `treadle generate` takes; it has learnt the tale."""
    said = shell(block("bash", "treadle train").strip() + " --temperature 0", tmp_path)
    assert " sat in the sun. The mouse brought her a flower. They were happy." in said
    assert (tmp_path / "tales" / "loss.png").exists()


def test_in_process_script_works(smollm2: Path, tmp_path: Path) -> None:
    """The script without a server gives logits of the printed shape."""
    script = block("python", "lm.logits")
    assert run([sys.executable, "-c", script], tmp_path).startswith("(3, 49152)\n")


@needs_registry
def test_own_sampler_changes_the_output(smollm2: Path, tmp_path: Path) -> None:
    """The README's sampler, saved as it says and named on the command line, changes the text.

    It is greedy, so that chance has no part in the comparison; and the stage passes the suite for authors.
    """
    save(tmp_path, "stages/shout.py", block("python", "class Shout"))
    command = block("bash", "--plugin-dir").strip()
    assert shell(command, tmp_path).strip()
    shouted = shell(command, tmp_path)
    plain = shell(re.sub(r"--stage '.*?'", "", command), tmp_path)
    checked = shell("treadle plugins --check --plugin-dir stages", tmp_path)
    assert "shout" in checked
    assert shouted != plain
    assert sum(map(str.isupper, shouted)) > sum(map(str.isupper, plain))


def test_plugin_is_listed_and_its_test_passes(tmp_path: Path) -> None:
    """Steps 1 and 2 of plugins/README.md: the listing is an active plugin, and the test runs as its command says."""
    save(tmp_path, "stages/sharpen.py", block("python", "class Sharpen", PLUGINS))
    listed = shell(block("bash", "treadle plugins", PLUGINS), tmp_path)
    assert re.search(r"^sharpen\t.*\tactive\tsharpen\t", listed, re.MULTILINE)
    save(tmp_path, "test_sharpen.py", block("python", "def test_sharpen", PLUGINS))
    assert "1 passed" in shell(block("bash", "pytest", PLUGINS), tmp_path)


@needs_registry
def test_plugin_is_used(smollm2: Path, tmp_path: Path) -> None:
    """Step 3 generates with the stage."""
    save(tmp_path, "stages/sharpen.py", block("python", "class Sharpen", PLUGINS))
    assert shell(block("bash", "treadle generate", PLUGINS), tmp_path).strip()


def test_stage_with_a_state_keeps_the_contract(tiny_folder: Path, tmp_path: Path) -> None:
    """The worked example of a state passes the conformance suite and changes greedy text."""
    save(tmp_path, "stages/fresh.py", block("python", "class Fresh", PLUGINS))
    imports = "from fresh import Fresh; from treadle_plugin_api.testing import check_stage"
    shell(f'PYTHONPATH=stages python -c "{imports}; check_stage(Fresh, strength=2.5)"', tmp_path)
    command = f"treadle generate 'the cat' --model '{tiny_folder}' --plugin-dir stages"
    command += " --temperature 0 --ignore-eos --max-tokens 24"
    plain = shell(command, tmp_path)
    fresh = shell(command + " --stage 'fresh:{\"strength\": 100.0}'", tmp_path)
    assert fresh != plain


def test_select_beside_temperature_0_is_refused(tmp_path: Path) -> None:
    """As plugins/README.md says, a request with both is refused; a model's own temperature gives way."""
    select = (
        "from treadle_plugin_api import Select, hookimpl\n"
        'class Last(Select):\n    """Choose the last token."""\n\n    name = "last"\n\n'
        "    def apply(self, logits, context, state=None):\n        return len(logits) - 1\n\n"
        "@hookimpl\ndef treadle_register_stages(register):\n    register(Last)\n"
    )
    save(tmp_path, "stages/last.py", select)
    command = "treadle generate 猫 -m cat-mouse --max-tokens 1 --plugin-dir stages --stage last"
    assert shell(command, tmp_path) == " 爱\n"
    refused = subprocess.run(
        ["bash", "-c", command + " --temperature 0"], cwd=tmp_path, capture_output=True, check=False, env=environment()
    )
    assert refused.returncode == 2
    assert b"temperature" in refused.stderr
