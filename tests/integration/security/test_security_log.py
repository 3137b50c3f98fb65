"""What a server never writes, however much it logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc

SECRET = "s3cret-0123456789abcdef"
WRONG = "wr0ng-0123456789abcdef"
LIST = "/treadle_protos.v1.ModelService/ListModels"


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
