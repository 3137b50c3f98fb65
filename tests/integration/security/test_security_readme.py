"""The commands of the page for operators, taken from it and run as they stand, on loopback and a free port."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import treadle_server.service

PAGE = Path(treadle_server.service.__file__).with_name("README.md")


def block(language: str, mark: str) -> str:
    """Return the one code block of a language that holds `mark`."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    found = [text.strip() for text in blocks if mark in text]
    assert len(found) == 1, f"{len(found)} blocks hold {mark!r}"
    return found[0]


def environment() -> dict[str, str]:
    """Return the environment with this venv's commands first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def shell(script: str, folder: Path) -> str:
    """Run lines of shell that must succeed, and return what they print."""
    command = ["bash", "-euc", script]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment(), timeout=60
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def started(mark: str, folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Run the page's `treadle serve` that holds `mark`; lend what it announces."""
    command = [*block("bash", mark).replace(" --host 0.0.0.0", "").split(), *options, "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def serving(mark: str, folder: Path) -> Iterator[str]:
    """The same; lend localhost and its port."""
    with started(mark, folder) as told:
        yield f"localhost:{told['port']}"


def scraped(mark: str, folder: Path, metrics: str) -> str:
    """Run the page's `curl` that holds `mark` against these metrics, and return what it prints."""
    port = metrics.removesuffix("/metrics").rpartition(":")[2]
    return shell(block("bash", mark).replace("9464", port), folder)


def test_tls_and_tokens_as_the_page_says(tmp_path: Path) -> None:
    """Made tokens and a certificate serve the command and the script; without a token there is no answer."""
    shell(f"{block('bash', 'umask 077')}\n{block('bash', 'keyout server.key')}", tmp_path)
    with serving("--token-file tokens", tmp_path) as target:
        generate = block("bash", "server.pem --token-file web.token").replace("localhost:7433", target)
        assert shell(generate, tmp_path).strip()
        refused = subprocess.run(
            generate.replace(" --token-file web.token", ""),
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        assert refused.returncode == 1
        assert "a token is needed" in refused.stderr
        script = block("python", "TlsOptions").replace("localhost:7433", target)
        (tmp_path / "script.py").write_text(script, encoding="utf-8")
        assert shell("python script.py", tmp_path).strip()


def test_mutual_tls_as_the_page_says(tmp_path: Path) -> None:
    """A client's certificate made by the page's commands is let in."""
    make = ["umask 077", block("bash", "keyout server.key"), block("bash", "keyout clients.key")]
    shell("\n".join(make), tmp_path)
    with serving("--tls-client-ca", tmp_path) as target:
        generate = block("bash", "--tls-cert alice.pem").replace("localhost:7433", target)
        assert shell(generate, tmp_path).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands need curl")
def test_metrics_as_the_page_says(tmp_path: Path) -> None:
    """Both `curl` lines bring the metrics, the second over TLS with a token, which is needed."""
    shell(f"{block('bash', 'umask 077')}\n{block('bash', 'keyout server.key')}", tmp_path)
    with started("--log-format json", tmp_path, "--metrics-port", "0") as told:
        assert "treadle_build" in scraped("curl http:", tmp_path, told["metrics"])
    with started("--token-file tokens", tmp_path, "--metrics-port", "0") as told:
        assert "treadle_build" in scraped("curl --cacert", tmp_path, told["metrics"])


def test_changes_while_serving_as_the_page_says(tmp_path: Path) -> None:
    """A model by name and one by folder, an adapter and new weights reach the server, which lists what is left."""
    (tmp_path / "tales.txt").write_text("The cat sat on the mat.\n\nThe mouse ran.\n", encoding="utf-8")
    shell(block("bash", "mkdir -p models"), tmp_path)
    with serving("--model-root models", tmp_path) as target:
        script = block("python", "load_adapter").replace("127.0.0.1:7433", target)
        (tmp_path / "script.py").write_text(script, encoding="utf-8")
        assert shell("python script.py", tmp_path).endswith("\n2\n")
        listed = shell(block("bash", "treadle models").replace("127.0.0.1:7433", target), tmp_path)
    assert [line.split("\t")[0] for line in listed.splitlines()] == ["second", "stories"]
