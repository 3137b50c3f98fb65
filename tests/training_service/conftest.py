"""Real trainers on loopback: one in this process for most tests, and processes of their own to be killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from treadle_client import TrainingClient
from treadle_server.service.address import join_address
from treadle_server.service.training.app import TrainerServer
from treadle_server.service.training.config import make_trainer_config

TREADLE = [sys.executable, "-m", "treadle_server.cli"]


@contextmanager
def _training(model: Path | str, **settings: Any) -> Iterator[str]:
    """Train a model in a thread of this process, and lend the address."""
    config = make_trainer_config({"port": 0, "grace_s": 0, **settings})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def make() -> TrainerServer:
        return TrainerServer(config)

    server = run(make())
    try:
        port = run(server.start())
        run(server.open(server.load(str(model))))
        yield join_address(config.host, port)
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _process(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a command that says its address in JSON, wait for it, and lend the process and the line."""
    command = [*TREADLE, *map(str, arguments), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1].decode()
            yield process, json.loads(line)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def training() -> Callable[..., AbstractContextManager[str]]:
    """Train a model with settings of TrainerConfig; lends the address."""
    return _training


@pytest.fixture(scope="session")
def process() -> Callable[..., AbstractContextManager[tuple[subprocess.Popen[bytes], Any]]]:
    """Start `treadle trainer` or `treadle serve` on a free port; lends the process and what it announced."""
    return _process


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate for 127.0.0.1 that signs itself as far as clients care, and its key, as PEM files."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain = b"".join(part.bytes() for part in (*issued.cert_chain_pems, authority.cert_pem))
    files = {"certificate": chain, "key": issued.private_key_pem.bytes()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return {name: folder / name for name in files}


@pytest.fixture
def target(tiny_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a trainer of the tiny model that keeps checkpoints in `tmp_path / "checkpoints"`."""
    with _training(tiny_folder, checkpoint_root=tmp_path / "checkpoints") as address:
        yield address


@pytest.fixture
def client(target: str) -> Iterator[TrainingClient]:
    """A client of that trainer."""
    with TrainingClient(target, timeout_s=60) as made:
        yield made
