"""Standard streams that are full, closed, in another encoding or a terminal; Ctrl-C before the command has begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from treadle_server.cli.streams import without_controls

Run = Callable[..., Any]  # the fixtures `treadle`, `start` and `on_terminal`
PROMPT = "a\x1b[31mb\x07\x7f\x9b\tc\r\nd"
SHOWN = "a[31mb\tc\nd"
ECHO = ("generate", PROMPT, "--echo", "--max-tokens", "1", "--temperature", "0")
BYTE_PLUGIN = '''
from treadle_plugin_api import Field, Select, hookimpl


class Byte(Select):
    """Choose the token of one byte."""

    name = "byte"

    value: int = Field(default=27, ge=0, le=255, description="the byte")

    def apply(self, logits, context, state=None):
        return next(i for i in range(context.vocab_size) if context.token_bytes(i) == bytes([self.value]))


@hookimpl
def treadle_register_stages(register):
    register(Byte)
'''


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which `treadle` is the command."""
    treadle = f'treadle() {{ "{sys.executable}" -m treadle_server.cli "$@"; }}; '
    variables = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", treadle + line], capture_output=True, check=False, timeout=60, env=variables)


@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
@pytest.mark.parametrize(
    "command",
    [
        "generate '猫 追' -m cat-mouse",
        "generate '猫 追' -m cat-mouse --json",
        "models",
        "models --json",
        "plugins",
        "explain '猫 追'",
        "--help",
        "--version",
        "serve cat-mouse --port 0",
        "chat '{tiny}' --max-tokens 2 <<< hi",
    ],
)
def test_stdout_that_takes_nothing_ends_the_command(command: str, where: str, tiny_folder: Path) -> None:
    """A full disk and a closed stdout end it with 1 and one line, without a traceback."""
    done = shell(f"treadle {command.format(tiny=tiny_folder)} {where}")
    errors = [line for line in done.stderr.decode().splitlines() if " INFO " not in line]
    assert (done.returncode, len(errors)) == (1, 1), errors
    assert errors[0].startswith("error: ")
    assert "No space left" in errors[0] or "Bad file descriptor" in errors[0]


def test_a_stderr_that_takes_nothing_changes_nothing() -> None:
    """The exit status stays what it was where nobody can be told why."""
    for where in ("2> /dev/full", "2>&-"):
        assert shell(f"treadle generate x --model nope {where}").returncode == 1
        assert shell(f"treadle models {where}").returncode == 0


@pytest.mark.parametrize("command", ["generate -", "chat '{tiny}'"])
@pytest.mark.parametrize(("stdin", "status", "words"), [("<&-", 1, "cannot read stdin"), ("<<< $'\\xff'", 2, "UTF-8")])
def test_stdin_that_holds_no_text_is_named(
    command: str, stdin: str, status: int, words: str, tiny_folder: Path
) -> None:
    """A closed stdin, and bytes that are no UTF-8, end the command with one line."""
    done = shell(f"treadle {command.format(tiny=tiny_folder)} {stdin}")
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, line.startswith("error: "), words in line) == (status, True, True), line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_exact_in_every_encoding(encoding: str) -> None:
    """Where stdout's encoding is not UTF-8 JSON escapes what is not ASCII; plain text has question marks."""
    done = shell("treadle generate '猫 追' -m cat-mouse --json", PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout)["choices"][0]["text"] == " 老鼠"
    assert (b"\\u8001" in done.stdout) is (encoding != "utf-8")
    plain = shell("treadle generate '猫 追' -m cat-mouse", PYTHONIOENCODING=encoding).stdout.decode()
    assert plain == (" 老鼠\n" if encoding == "utf-8" else " ??\n")


def test_a_terminal_gets_no_control_characters(on_terminal: Run, treadle: Run, tiny_folder: Path) -> None:
    """On a terminal they are dropped but for line ends and tabs; a pipe gets the text as it is."""
    assert on_terminal(*ECHO, "-m", tiny_folder).startswith(SHOWN)
    assert treadle(*ECHO, "-m", tiny_folder).stdout.startswith(PROMPT)


def test_json_on_a_terminal_is_exact_and_harmless(on_terminal: Run, tiny_folder: Path) -> None:
    """JSON escapes the control characters that it need not escape, too."""
    shown = on_terminal(*ECHO, "-m", tiny_folder, "--json")
    assert without_controls(shown) == shown
    assert json.loads(shown)["choices"][0]["text"].startswith(PROMPT)


def test_a_chat_on_a_terminal_gets_no_control_characters(
    on_terminal: Run, treadle: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    """The same holds for answers of a chat."""
    (tmp_path / "byte.py").write_text(BYTE_PLUGIN)
    arguments = ("chat", tiny_folder, "--plugin-dir", tmp_path, "--stage", "byte", "--max-tokens", "3")
    assert on_terminal(*arguments, stdin="hi\n") == "\n\n"
    assert treadle(*arguments, stdin="hi\n").stdout == "\x1b\x1b\x1b\n\n"


def test_controls_are_c0_del_and_c1() -> None:
    """Line ends, tabs and every other character stay."""
    text = "".join(map(chr, range(0x250)))
    kept = "\t\n" + "".join(map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x250)]))
    assert without_controls(text) == kept


@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.15, 0.2])
def test_ctrl_c_at_the_start_leaves_no_traceback(start: Run, tiny_folder: Path, delay_s: float) -> None:
    """While modules are still imported Ctrl-C ends a command with 130 and nothing else."""
    with start("chat", tiny_folder) as process:
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=10)
    assert (output, errors) == (b"", b"")
    assert process.returncode in (130, -signal.SIGINT)  # the latter before Python itself has started


def test_ctrl_c_during_the_imports_is_130() -> None:
    """An interrupt inside the import of the commands becomes the exit status."""
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'treadle_server.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "from treadle_server.cli import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")
