"""Certificates made on the fly, and `treadle serve` as a process with settings of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

# At DEBUG, for what must never be in a log; basicConfig of the command then changes nothing.
TREADLE = "import logging; logging.basicConfig(level=logging.DEBUG); from treadle_server.cli.app import run; run()"
SLOW_PLUGIN = '''
import time

from treadle_plugin_api import Stage, hookimpl


class Slow(Stage):
    """Wait before every token."""

    name = "slow"
    kind = "transform"

    def apply(self, logits, context, state=None):
        time.sleep(0.05)
        return logits


@hookimpl
def treadle_register_stages(register):
    register(Slow)
'''


@dataclass(frozen=True)
class Pki:
    """Two authorities, one for servers and one for clients, with what they issue as PEM files of a folder."""

    folder: Path
    servers: trustme.CA
    clients: trustme.CA

    def issue(self, authority: trustme.CA, name: str, **names: str) -> tuple[Path, Path]:
        """Write NAME.pem and NAME.key for 127.0.0.1 and localhost; return their paths."""
        issued = authority.issue_cert("localhost", "127.0.0.1", **names)
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        return write(self.folder / f"{name}.pem", chain), write(
            self.folder / f"{name}.key", issued.private_key_pem.bytes()
        )

    def ca(self, authority: trustme.CA, name: str) -> Path:
        """Write the authority's own certificate; return its path."""
        return write(self.folder / f"{name}.pem", authority.cert_pem.bytes())


def write(path: Path, content: bytes | str) -> Path:
    """Put a file in place at once, closed to other users, as operators should."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.chmod(0o600)
    return new.replace(path)


@pytest.fixture(scope="session")
def replace_file() -> Callable[[Path, bytes | str], Path]:
    """Put a file in place at once, closed to other users."""
    return write


@pytest.fixture(scope="session")
def make_pki() -> Callable[[Path], Pki]:
    """Make fresh authorities that write to a folder."""
    return lambda folder: Pki(folder, trustme.CA(), trustme.CA())


@pytest.fixture
def pki(make_pki: Callable[[Path], Pki], tmp_path: Path) -> Pki:
    """Fresh authorities."""
    return make_pki(tmp_path)


@dataclass(frozen=True)
class Served:
    """A running `treadle serve`."""

    process: subprocess.Popen[bytes]
    target: str
    log_file: Path

    def log(self) -> str:
        """Return what it has logged so far."""
        return self.log_file.read_text("utf-8", "replace")

    def wait_for_log(self, text: str, timeout_s: float = 10) -> None:
        """Wait until the log holds a text."""
        end_s = time.monotonic() + timeout_s
        while text not in self.log():
            assert time.monotonic() < end_s, f"no {text!r} in {self.log()}"
            time.sleep(0.02)


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def serve(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Run `treadle serve` of the tiny model at DEBUG on a free loopback port, and wait until it serves.

    With `command="trainer"` it is a trainer of the model instead.
    """

    @contextmanager
    def serving(*arguments: str | Path, command: str = "serve") -> Iterator[Served]:
        log_file = tmp_path_factory.mktemp("log") / "serve.log"
        model = f"tiny={tiny_folder}" if command == "serve" else str(tiny_folder)
        start = [sys.executable, "-c", TREADLE, command, model, "--port", "0", "--json"]
        environment = {**os.environ, "GRPC_VERBOSITY": "debug", "PYTHONASYNCIODEBUG": "1"}
        with (
            log_file.open("wb") as log,
            subprocess.Popen(
                [*start, *map(str, arguments)], stdout=subprocess.PIPE, stderr=log, env=environment
            ) as process,
        ):
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, log_file.read_text()
                yield Served(process, json.loads(line)["address"], log_file)
            finally:
                process.kill()

    return serving


@pytest.fixture
def slow_plugins(tmp_path: Path) -> Path:
    """A folder with a plugin whose stage `slow` waits before every token."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW_PLUGIN)
    return folder
