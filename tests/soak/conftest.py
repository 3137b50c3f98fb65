"""Two sizes for every test here, server processes that are watched from outside, and the figures that tests print.

A test that takes `count` gets it twice, from `@pytest.mark.counts(default=..., full=...)`: the small one in every run,
the full one with `-m soak`. What a test hands to `figure` stands at the end of pytest's output; README.md keeps it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from treadle_client import Client

TREADLE = [sys.executable, "-m", "treadle_server.cli"]
FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and begin with no figures."""
    config.addinivalue_line("markers", "counts(default, full): how much a test does in every run, and with -m soak")
    config.stash[FIGURES] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `count` with both counts of its mark."""
    if "count" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("counts")
        assert mark is not None, f"{metafunc.definition.name} takes `count` and has no mark `counts`"
        full = pytest.param(mark.kwargs["full"], marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
        metafunc.parametrize("count", [mark.kwargs["default"], full])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the figures."""
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[FIGURES]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figure(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print a line at the end of the run."""
    return pytestconfig.stash[FIGURES].append


@dataclass
class Running:
    """A process of ours, and what it told about itself on its first line."""

    process: subprocess.Popen[bytes]
    told: dict[str, Any]
    log: Path
    _num_looked_at: int = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self.told["address"])

    def kill(self) -> None:
        """End it as a crash would, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def usage(self) -> tuple[int, int, int]:
        """Return its memory in bytes, its threads and its open files."""
        watched = psutil.Process(self.process.pid)
        return watched.memory_info().rss, watched.num_threads(), watched.num_fds()

    def faults(self) -> list[str]:
        """Return the lines that its log has got since the last look and that tell of a fault of its own."""
        lines = self.log.read_text().splitlines()
        new, self._num_looked_at = lines[self._num_looked_at :], len(lines)
        return [line for line in new if "Traceback" in line or "an RPC failed" in line]


@contextmanager
def _spawned(log: Path, arguments: Sequence[str | Path]) -> Iterator[Running]:
    command = [*TREADLE, *map(str, arguments), "--json"]
    with log.open("ab") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Running(process, json.loads(line), log)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Start `treadle serve` or `treadle trainer`, wait until it takes calls, and lend it; it is killed at the end."""
    folder = tmp_path_factory.mktemp("logs")
    return lambda *arguments: _spawned(folder / f"{time.monotonic_ns()}.log", arguments)


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a configuration file for `treadle serve --config`, and return it."""

    def write(**values: float | str | list[str]) -> Path:
        file = tmp_path_factory.mktemp("configured") / "treadle.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
        return file

    return write


def _wait_until_idle(client: Client, timeout_s: float = 30) -> None:
    """Return once no model has a request, or memory of one; fails after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    busy: list[Any] = []
    while time.monotonic() < end_s:
        busy = [
            load
            for load in client.get_load()
            if load.num_waiting_requests or load.num_running_sequences or load.kv_cache_bytes
        ]
        if not busy:
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy after {timeout_s} s: {busy}")


@pytest.fixture(scope="session")
def wait_until_idle() -> Callable[..., None]:
    """Wait until a server holds nothing of any request; fails if that does not come."""
    return _wait_until_idle
