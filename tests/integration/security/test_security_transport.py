"""TLS and mutual TLS of a real server process, and certificates that change while it serves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import Client, TlsOptions, UnavailableError


def models(target: str, **tls: Any) -> list[str]:
    """Ask for the models on a connection of its own."""
    with Client(target, tls=TlsOptions(**tls), retries=0, timeout_s=10) as client:
        return [model.name for model in client.list_models()]


def eventually(call: Callable[[], object]) -> None:
    """Try again until a call works: files are looked at once a second, and a handshake may be under way."""
    end_s = time.monotonic() + 10
    while True:
        try:
            call()
        except UnavailableError:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        else:
            return


def test_tls_serves_those_who_trust_the_authority(pki: Any, serve: Any) -> None:
    """A client that trusts the server's authority gets answers; one that does not, or speaks plain text, gets none."""
    certificate, key = pki.issue(pki.servers, "server")
    with serve("--tls-cert", certificate, "--tls-key", key) as server:
        assert models(server.target, root_certificates=pki.ca(pki.servers, "ca")) == ["tiny"]
        with pytest.raises(UnavailableError):
            models(server.target, root_certificates=pki.ca(pki.clients, "other"))
        with Client(server.target, retries=0, timeout_s=10) as client, pytest.raises(UnavailableError):
            client.list_models()


def test_mutual_tls_serves_known_clients_only(pki: Any, serve: Any) -> None:
    """A certificate of the clients' authority is let in, and may do everything; none, or another one, is not let in."""
    certificate, key = pki.issue(pki.servers, "server")
    ca = pki.ca(pki.servers, "ca")
    own, own_key = pki.issue(pki.clients, "client", common_name="bob")
    foreign, foreign_key = pki.issue(pki.servers, "foreign")
    with serve(
        "--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", pki.ca(pki.clients, "clients")
    ) as server:
        known = {"root_certificates": ca, "certificate_chain": own, "private_key": own_key}
        assert models(server.target, **known) == ["tiny"]
        for others in ({}, {"certificate_chain": foreign, "private_key": foreign_key}):
            with pytest.raises(UnavailableError):
                models(server.target, root_certificates=ca, **others)
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), own_key.read_bytes(), own.read_bytes())
        with grpc.secure_channel(server.target, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/treadle_protos.v1.ModelService/UnloadModel")(b"")
        refusals = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE}
        assert caught.value.code() not in refusals


def test_new_certificate_is_taken_while_serving(pki: Any, serve: Any) -> None:
    """After the files are replaced new connections see the new certificate, and old connections go on."""
    certificate, key = pki.issue(pki.servers, "server")
    ca = pki.ca(pki.servers, "ca")
    with (
        serve("--tls-cert", certificate, "--tls-key", key) as server,
        Client(server.target, tls=TlsOptions(root_certificates=ca)) as before,
    ):
        before.list_models()
        pki.issue(pki.clients, "server")  # of another authority, so that a client can tell them apart
        new_ca = pki.ca(pki.clients, "new")
        eventually(lambda: models(server.target, root_certificates=new_ca))
        with pytest.raises(UnavailableError):
            models(server.target, root_certificates=ca)
        before.list_models()


def test_broken_certificate_leaves_the_old_one(pki: Any, serve: Any, replace_file: Any) -> None:
    """A key that does not belong to the certificate, as halfway through an exchange, changes nothing but the log."""
    certificate, key = pki.issue(pki.servers, "server")
    ca = pki.ca(pki.servers, "ca")
    with serve("--tls-cert", certificate, "--tls-key", key) as server:
        _, other_key = pki.issue(pki.servers, "other")
        replace_file(key, other_key.read_bytes())
        end_s = time.monotonic() + 10
        while "is not the key of the certificate" not in server.log():
            assert time.monotonic() < end_s
            assert models(server.target, root_certificates=ca) == ["tiny"]
        assert models(server.target, root_certificates=ca) == ["tiny"]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_server_that_listens_beyond_the_machine_names_what_is_missing(
    treadle_failure: Any, pki: Any, secure: bool
) -> None:
    """`serve` refuses another address without TLS; with TLS it tries to listen, here on one that no machine has."""
    certificate, key = pki.issue(pki.servers, "server")
    tls = ["--tls-cert", certificate, "--tls-key", key] if secure else []
    error = treadle_failure("serve", "cat-mouse", "--host", "203.0.113.1", "--port", "0", *tls)
    assert ("cannot listen on 203.0.113.1" if secure else "--insecure") in error


@pytest.fixture
def treadle_failure(tmp_path: Path) -> Callable[..., str]:
    """Run a command that must fail with status 1, and return what it says."""

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "treadle_server.cli", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    return run
