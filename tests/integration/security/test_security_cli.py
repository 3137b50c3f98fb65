"""The command line against a server with TLS, client certificates and tokens: what works, and what it says if not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOKEN = "0123456789abcdef-admin"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the certificates and tokens lie and the commands run."""
    return tmp_path_factory.mktemp("security")


@pytest.fixture
def treadle(folder: Path) -> Run:
    """Run a command to its end in the folder of the certificates, with a token in the environment or none."""

    def run(*arguments: str | Path, token: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "treadle_server.cli", *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TREADLE_TOKEN": token},
            timeout=60,
        )
        assert "Traceback" not in done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def target(make_pki: Any, serve: Any, replace_file: Any, folder: Path) -> Iterator[str]:
    """Address of a server that asks for a certificate and a token; ca, client, token and others lie in the folder."""
    pki = make_pki(folder)
    certificate, key = pki.issue(pki.servers, "server")
    pki.issue(pki.clients, "client", common_name="bob")
    pki.ca(pki.servers, "ca")
    clients = pki.ca(pki.clients, "clients")
    tokens = replace_file(folder / "tokens", f"alice admin {TOKEN}\n")
    replace_file(folder / "token", f"{TOKEN}\n")
    flags = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", clients, "--token-file", tokens]
    with serve(*flags) as server:
        yield server.target


TLS = ["--tls-ca", "ca.pem", "--tls-cert", "client.pem", "--tls-key", "client.key"]


def test_every_command_reaches_the_server(treadle: Run, target: str) -> None:
    """With certificate and token, from a file or the environment, each command with --target works."""
    there = ["--target", target, *TLS]
    assert json.loads(treadle("models", *there, "--json", token=TOKEN).stdout)[0]["name"] == "tiny"
    assert treadle("plugins", *there, "--token-file", "token").stdout
    assert treadle("generate", "a", *there, "--max-tokens", "2", "--token-file", "token", token="wrong").returncode == 0
    chat = treadle("chat", *there, token=TOKEN)
    assert (chat.returncode, chat.stderr) == (0, "")


@pytest.mark.parametrize(
    ("flags", "token", "status", "message"),
    [
        (TLS, "", 1, "a token is needed \\(--token-file FILE, or the variable TREADLE_TOKEN"),
        (TLS, "wrong-token", 1, "the token is none of this server's"),
        ([*TLS, "--token-file", "tokens"], "", 2, "--token-file tokens must hold the token and nothing else"),
        ([*TLS, "--token-file", "none"], "", 1, "none: No such file"),
        ([], "", 1, "give --tls or --tls-ca"),
        (["--tls-ca", "ca.pem"], TOKEN, 1, "--tls-cert where it asks for certificates"),
        (["--tls-ca", "clients.pem", *TLS[2:]], TOKEN, 1, "certificate is not trusted: give --tls-ca FILE"),
        (["--tls"], TOKEN, 1, "certificate is not trusted: give --tls-ca FILE"),
        ([*TLS, "--tls-server-name", "a.org"], TOKEN, 1, "does not carry the name a.org: give --tls-server-name"),
        (TLS[:4], TOKEN, 2, "--tls-cert and --tls-key go together"),
        (["--tls-ca", "none.pem"], TOKEN, 1, "none.pem: No such file"),
        (["--tls-ca", "client.key"], TOKEN, 2, "--tls-ca client.key holds no PEM certificate"),
        ([*TLS[:4], "--tls-key", "ca.pem"], TOKEN, 2, "--tls-key ca.pem holds no PEM private key"),
    ],
)
def test_failure_says_what_to_do(
    treadle: Run, target: str, flags: list[str], token: str, status: int, message: str
) -> None:
    """What is missing or wrong is named by its option, and the token never shown."""
    done = treadle("models", "--target", target, *flags, token=token)
    assert done.returncode == status, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_token_never_goes_in_plain_text_to_another_machine(treadle: Run) -> None:
    """Nothing is sent; the error names the options that make it safe."""
    done = treadle("models", "--target", "192.0.2.1:7433", token=TOKEN)
    assert done.returncode == 2
    assert "would travel in plain text; add --tls, or --tls-ca FILE" in done.stderr


@pytest.mark.parametrize("command", [["models"], ["plugins"], ["generate", "a"], ["chat", "cat-mouse"]])
def test_options_of_a_connection_need_a_target(treadle: Run, command: list[str]) -> None:
    """Without --target there is nothing to connect to; a token in the environment is no option and harms nothing."""
    done = treadle(*command, "--tls-ca", "ca.pem")
    assert done.returncode == 2
    assert "--tls-ca is about a running server and needs --target" in done.stderr
    if command[0] == "models":
        assert treadle("models", token=TOKEN).returncode == 0
