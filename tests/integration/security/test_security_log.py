"""What a server never writes, however much it logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest

SECRET = "s3cret-0123456789abcdef"
WRONG = "wr0ng-0123456789abcdef"
LOAD = "/treadle_protos.v1.ModelService/LoadModel"
LIST = "/treadle_protos.v1.ModelService/ListModels"


def test_it_says_who_was_refused(serve: Any, tmp_path: Path, replace_file: Any) -> None:
    """Who lacks the role by name and role, who has no token by address; the start says how many tokens there are."""
    token_file = replace_file(tmp_path / "tokens", f"web user {SECRET}\n")
    with serve("--token-file", token_file) as server, grpc.insecure_channel(server.target) as channel:
        for metadata in ([("authorization", f"Bearer {SECRET}")], []):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(LOAD)(b"", metadata=metadata, timeout=10)
        server.wait_for_log("UNAUTHENTICATED")
        (denied, unknown) = (line for line in server.log().splitlines() if "ModelService/LoadModel" in line)
        assert f"listening on {server.target} with plain text and 1 token\n" in server.log()
    assert "PERMISSION_DENIED" in denied
    assert " client=web role=user " in denied
    assert " client=127.0.0.1 " in unknown
    assert "role=" not in unknown


def test_no_secret_comes_into_the_log(pki: Any, serve: Any, tmp_path: Path, replace_file: Any) -> None:
    """At DEBUG, with asyncio's and gRPC's own logs: good, wrong and malformed tokens, broken files."""
    certificate, key = pki.issue(pki.servers, "server")
    token_file = replace_file(tmp_path / "tokens", f"admin {SECRET}\n")
    flags = ["--tls-cert", certificate, "--tls-key", key, "--token-file", token_file]
    credentials = grpc.ssl_channel_credentials(pki.ca(pki.servers, "ca").read_bytes())
    with serve(*flags) as server, grpc.secure_channel(server.target, credentials) as channel:
        answers: list[str] = []

        def call(*headers: str) -> bool:
            try:
                channel.unary_unary(LIST)(b"", metadata=[("authorization", header) for header in headers], timeout=10)
            except grpc.RpcError as error:
                answers.append(str(error))
                return False
            return True

        assert call(f"Bearer {SECRET}")
        for headers in ([f"Bearer {WRONG}"], [f"Digest {WRONG}"], [f"Bearer {WRONG}", f"Bearer {SECRET}"], [WRONG]):
            assert not call(*headers)
        for number, broken in enumerate(
            (f"{SECRET}\n", f"a b c {SECRET}\n", f"{SECRET} user\n", f"user {SECRET[:8]}\n")
        ):
            replace_file(token_file, broken)
            for _ in range(100):
                assert call(f"Bearer {SECRET}")
                if server.log().count("the tokens stay as they were") > number:
                    break
                time.sleep(0.1)
        log = server.log()
        assert "DEBUG" in log
        assert log.count("the tokens stay as they were") == 4
    private = [line for line in key.read_text().splitlines() if line and not line.startswith("-----")]
    for secret in (SECRET, WRONG, SECRET[:8], *private):
        assert secret not in log + "".join(answers)
    assert "Bearer" not in log
    assert "Digest" not in log
