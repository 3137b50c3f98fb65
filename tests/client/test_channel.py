"""Constructor arguments, tokens and TLS."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    TlsOptions,
    TrainingClient,
    UnavailableError,
    UnimplementedError,
)
from treadle_client._channel import is_loopback
from treadle_client._peer import checked_target


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:7433", "127.8.9.1:1", "localhost:1", "localhost", "[::1]:7433", "[::1]", "unix:/run/x"),
        *("unix-abstract:x", "dns:localhost:1", "dns:///localhost:1", "dns://8.8.8.8/localhost:1"),
        *("ipv4:127.0.0.1:1", "ipv6:[::1]:1"),
    ],
)
def test_loopback_targets(target: str) -> None:
    """Targets that stay on this machine are known in all of gRPC's spellings."""
    assert is_loopback(target)


@pytest.mark.parametrize(
    "target",
    [
        *("example.org:1", "10.0.0.1:1", "127.0.0.1.example.org:1", "localhost.example.org:1", "1270.0.0.1:1"),
        *("[::2]:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "dns://127.0.0.1/example.org:1", "xds:///localhost", "0.0.0.0:1"),
    ],
)
def test_other_targets(target: str) -> None:
    """Whatever might leave the machine is not loopback."""
    assert not is_loopback(target)


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_a_token_never_travels_in_the_clear(cls: type) -> None:
    """A token for another machine without TLS is refused, and not shown."""
    with pytest.raises(InvalidArgumentError, match=r"token: .*TLS") as caught:
        cls("example.org:7433", token="s3cret")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "a b", "a\n", "é", 3])
def test_tokens_that_no_header_carries_are_refused(token: Any) -> None:
    """A token is visible ASCII."""
    with pytest.raises(InvalidArgumentError, match="token: expected"):
        Client(token=token)


def test_the_token_goes_with_every_call(server: Any, story: Any) -> None:
    """Streams and unary calls carry the token as a bearer."""
    with Client(server.target, token="s3cret") as client:
        list(client.stream("a"))
        client.list_models()
    assert [m["authorization"] for m in story.metadata] == ["Bearer s3cret"] * 2


def test_no_token_no_header(client: Client, script: Any) -> None:
    """Without a token nothing is sent in its place."""
    client.list_models()
    assert "authorization" not in script.metadata[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": ""},
        {"target": 7433},
        {"tls": True},
        {"retries": -1},
        {"retries": True},
        {"max_message_bytes": 0},
        {"max_message_bytes": 2**31},
        {"timeout_s": -1.0},
        {"tls": TlsOptions(root_certificates="/nowhere/ca.pem")},
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    """A wrong constructor argument is named with its value."""
    (name,) = arguments
    with pytest.raises(InvalidArgumentError, match=name):
        Client(**arguments)


def test_secrets_are_not_shown() -> None:
    """The repr of options and connection holds neither the private key nor the token."""
    options = TlsOptions(private_key=b"s3cret")
    with Client(token="s3cret") as client:
        assert "s3cret" not in repr(options) + repr(client) + repr(client._connection)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for treadle.test and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl program")
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=treadle.test"]
    command += ["-addext", "subjectAltName=DNS:treadle.test", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


@pytest.fixture
def tls_server(start_server: Any, certificate: tuple[Path, Path]) -> Any:
    """A fake server that speaks TLS and asks for the client's certificate, which may be its own."""
    chain, key = (path.read_bytes() for path in certificate)
    return start_server(grpc.ssl_server_credentials([(key, chain)], chain, require_client_auth=True))


def test_tls_with_files(tls_server: Any, certificate: tuple[Path, Path]) -> None:
    """Certificates may be paths; the token goes along."""
    chain, key = certificate
    tls = TlsOptions(root_certificates=chain, certificate_chain=str(chain), private_key=key, server_name="treadle.test")
    with Client(tls_server.target, tls=tls, token="s3cret", timeout_s=20) as client:
        client.server_info()
    assert tls_server.script.metadata[0]["authorization"] == "Bearer s3cret"


async def test_tls_with_bytes_asynchronously(tls_server: Any, certificate: tuple[Path, Path]) -> None:
    """Certificates may be PEM bytes; the asynchronous client takes the same options."""
    chain, key = (path.read_bytes() for path in certificate)
    tls = TlsOptions(root_certificates=chain, certificate_chain=chain, private_key=key, server_name="treadle.test")
    async with AsyncClient(tls_server.target, tls=tls, timeout_s=20) as client:
        await client.server_info()


def test_a_server_with_another_name_is_not_trusted(tls_server: Any, certificate: tuple[Path, Path]) -> None:
    """Without `server_name`, the certificate must carry the target's host."""
    chain, key = certificate
    tls = TlsOptions(root_certificates=chain, certificate_chain=chain, private_key=key)
    with Client(tls_server.target, tls=tls, retries=0) as client, pytest.raises(UnavailableError):
        client.server_info()


@pytest.mark.parametrize(
    ("target", "with_port"),
    [
        ("localhost", "localhost:7433"),
        ("::1", "[::1]:7433"),
        ("[::1]", "[::1]:7433"),
        ("[::1]:9", "[::1]:9"),
        ("example.org:65535", "example.org:65535"),
        ("unix:/run/x", "unix:/run/x"),
        ("dns:///example.org:1", "dns:///example.org:1"),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", "ipv4:127.0.0.1:1,10.0.0.1:1"),
    ],
)
def test_a_target_without_a_port_has_the_usual_one(target: str, with_port: str) -> None:
    """Other ways in which gRPC names a server stay as they are."""
    assert checked_target(target, 7433) == with_port


@pytest.mark.parametrize(
    ("target", "message"),
    [
        *((f"127.0.0.1:{port}", "port must be 1 to 65535") for port in ("74333", "0", "65536", "-1", "x", "9" * 5000)),
        ("127.0.0.1:", "the port is missing"),
        ("http://127.0.0.1:7433", "HOST:PORT, without http://"),
        ("HTTPS://example.org", "HOST:PORT, without HTTPS://"),
        (" ", "host:port"),
    ],
)
@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_a_target_that_is_none_is_refused(cls: type, target: str, message: str) -> None:
    """A port would be taken modulo 65536, and a URL be looked up as a host's name."""
    with pytest.raises(InvalidArgumentError, match=message):
        cls(target)


def test_nobody_there_is_said_in_words() -> None:
    """The error names the target and the cause, not gRPC's inner workings, and has no second traceback."""
    with Client("127.0.0.1:9", retries=0) as client, pytest.raises(UnavailableError) as caught:
        client.generate("a")
    assert str(caught.value) == "no server answers at 127.0.0.1:9 (connection refused)"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "closed the connection"),
        ({"tls": TlsOptions()}, "its certificate is not trusted"),
        ({"tls": TlsOptions(server_name="example.org")}, "its certificate"),
    ],
)
def test_tls_that_fails_is_said_in_words(tls_server: Any, options: dict[str, Any], message: str) -> None:
    """Each cause has its own words."""
    with Client(tls_server.target, retries=0, **options) as client, pytest.raises(UnavailableError, match=message):
        client.generate("a")


def test_the_port_of_the_other_kind_is_guessed() -> None:
    """A server that lacks the whole service may be a trainer, and the other way round."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(UnimplementedError, match="may be a trainer's port"):
            client.server_info()
        with (
            TrainingClient(f"127.0.0.1:{port}") as client,
            pytest.raises(UnimplementedError, match="does not offer TrainingService: it may be an inference server's"),
        ):
            client.training_state()
    finally:
        server.stop(0)
