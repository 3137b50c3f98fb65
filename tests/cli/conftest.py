"""The command line as its users meet it: real processes, a real server, and a sampler stage that takes its time."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

TREADLE = [sys.executable, "-m", "treadle_server.cli"]
SLOW_PLUGIN = '''
import time
from typing import Any

from treadle_plugin_api import Field, Stage, hookimpl


class Slow(Stage):
    """Wait before every token."""

    name = "slow"
    kind = "transform"

    seconds: float = Field(default=0.02, ge=0, description="time to wait")

    def apply(self, logits: Any, context: Any, state: Any = None) -> Any:
        time.sleep(self.seconds)
        return logits


@hookimpl
def treadle_register_stages(register: Any) -> None:
    register(Slow)
'''


@contextmanager
def _started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command with pipes, and kill it at the end if it still runs."""
    command = [*TREADLE, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `treadle serve` on a free port, wait until it serves, and lend the process and its address."""
    with _started("serve", "--port", "0", "--json", *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        yield process, json.loads(line)["address"]


@pytest.fixture(scope="session")
def start() -> Callable[..., AbstractContextManager[subprocess.Popen[bytes]]]:
    """Start a command with pipes; killed at the end if it still runs."""
    return _started


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[tuple[subprocess.Popen[bytes], str]]]:
    """Start `treadle serve` on a free port and wait until it serves; lends the process and its address."""
    return _serving


@pytest.fixture(scope="session")
def treadle() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end; the status must be as given (0)."""

    def run(*arguments: str | Path, status: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*TREADLE, *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "200"}
        raw = subprocess.run(
            command, input=stdin.encode(), capture_output=True, check=False, env=environment, timeout=60
        )
        # Decoded here, as text mode would turn a carriage return that the model wrote into a line end.
        done = subprocess.CompletedProcess(command, raw.returncode, raw.stdout.decode(), raw.stderr.decode())
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def on_terminal() -> Callable[..., str]:
    """Run a command with its stdout on a terminal; returns what the terminal got. The command must succeed."""

    def run(*arguments: str | Path, stdin: str = "") -> str:
        terminal, process_end = pty.openpty()
        command = [*TREADLE, *map(str, arguments)]
        # Piped stdin: the command sees a terminal only where it writes. What it writes fits into the terminal's buffer.
        done = subprocess.run(
            command, input=stdin.encode(), stdout=process_end, stderr=subprocess.PIPE, check=False, timeout=60
        )
        shown = os.read(terminal, 1 << 16).decode().replace("\r\n", "\n")
        os.close(process_end)
        os.close(terminal)
        assert done.returncode == 0, done.stderr
        return shown

    return run


@pytest.fixture(scope="session")
def plugin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin whose stage `slow` waits before every token."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "slow.py").write_text(SLOW_PLUGIN)
    return folder


@pytest.fixture(scope="session")
def target(tiny_folder: Path, plugin_dir: Path) -> Iterator[str]:
    """Address of a server of the tiny model, called `tiny`, with the stage `slow`."""
    with _serving(f"tiny={tiny_folder}", "--plugin-dir", plugin_dir) as (_, address):
        yield address


@pytest.fixture
def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
