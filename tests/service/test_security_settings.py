"""Which settings a server starts with, and what callers without a token may do then."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import trustme
from treadle_server.config import SecurityConfig
from treadle_server.errors import AccessDeniedError, ConfigError, UnauthenticatedError
from treadle_server.service.security.server_security import ServerSecurity, address_name, is_loopback
from treadle_server.service.training.config import make_trainer_config

LIST = "/treadle_protos.v1.ModelService/ListModels"
LOAD = "/treadle_protos.v1.ModelService/LoadModel"
OTHERS = "0.0.0.0"


class Context:
    """What the security asks of a call."""

    def __init__(self, *headers: str, subject: bytes | None = None) -> None:
        self._headers = headers
        self._subject = subject

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """Return the headers."""
        return [("authorization", header) for header in self._headers]

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what the certificate says."""
        return {} if self._subject is None else {"x509_subject": [self._subject]}

    def peer(self) -> str:
        """Return the address."""
        return "ipv4:192.0.2.7:50123"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate, its key, its authority, another key, a token file."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    one, two = ca.issue_cert("localhost"), ca.issue_cert("localhost")
    contents = {
        "certificate": one.cert_chain_pems[0].bytes(),
        "key": one.private_key_pem.bytes(),
        "other_key": two.private_key_pem.bytes(),
        "ca": ca.cert_pem.bytes(),
        "tokens": b"alice admin 0123456789abcdef\nbob user fedcba9876543210\n",
        "text": b"nothing of the kind\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return {name: folder / name for name in [*contents, "missing"]}


def security(files: dict[str, Path], **settings: Any) -> ServerSecurity:
    """Make the security of settings in which a text may be the name of a file."""
    given = {name: files.get(str(value), value) for name, value in settings.items()}
    return ServerSecurity(SecurityConfig(**given))


def entered(made: ServerSecurity, method: str, context: Any) -> str:
    """The name of who may call a method."""
    caller = made.identify(context)
    made.authorise(method, caller)
    return caller.name


TLS = {"tls_certificate": "certificate", "tls_key": "key"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_nothing(files: dict[str, Path], host: str) -> None:
    """On loopback a server starts without TLS, and everyone on the machine may do everything."""
    assert is_loopback(host)
    made = security(files, host=host)
    assert entered(made, LOAD, Context()) == "192.0.2.7"


@pytest.mark.parametrize("host", [OTHERS, "::", "192.0.2.1", "example.org", "", "127.1", "localhost.example.org", "*"])
@pytest.mark.parametrize("tokens", [{}, {"token_file": "tokens"}], ids=["open", "tokens"])
def test_other_addresses_need_tls_or_a_word(files: dict[str, Path], host: str, tokens: dict[str, str]) -> None:
    """Elsewhere plain text is refused, with tokens too, unless it is accepted by name; TLS is taken."""
    with pytest.raises(ConfigError, match=f"'{host}' can be reached.*--tls-cert.*--insecure".replace("*'", r"\*'", 1)):
        security(files, host=host, **tokens)
    security(files, host=host, insecure=True, **tokens)
    security(files, host=host, **TLS, **tokens)


@pytest.mark.parametrize("settings", [{"insecure": True}, TLS], ids=["plain", "tls"])
def test_without_tokens_others_are_no_administrators(files: dict[str, Path], settings: dict[str, Any]) -> None:
    """Beyond the machine and without tokens or mutual TLS anyone may generate and nobody may load."""
    made = security(files, host=OTHERS, **settings)
    entered(made, LIST, Context())
    with pytest.raises(AccessDeniedError, match=r"needs the role admin.*--token-file"):
        entered(made, LOAD, Context())


def test_mutual_tls_is_trusted(files: dict[str, Path]) -> None:
    """Whoever has a certificate of the clients' authority may do everything, under the name in it."""
    made = security(files, host=OTHERS, **TLS, tls_client_ca="ca")
    assert entered(made, LOAD, Context(subject=b"CN=bob")) == "CN=bob"


def test_tokens_decide_beside_mutual_tls(files: dict[str, Path]) -> None:
    """With both, a certificate alone is not enough, and the token says the role."""
    made = security(files, host=OTHERS, **TLS, tls_client_ca="ca", token_file="tokens")
    with pytest.raises(UnauthenticatedError):
        entered(made, LIST, Context(subject=b"CN=bob"))
    with pytest.raises(AccessDeniedError, match="bob has the role user"):
        entered(made, LOAD, Context("Bearer fedcba9876543210", subject=b"CN=bob"))
    assert entered(made, LOAD, Context("Bearer 0123456789abcdef")) == "alice"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_certificate": "certificate"}, "go together"),
        ({"tls_key": "key"}, "go together"),
        ({"tls_client_ca": "ca"}, "tls_client_ca needs tls_certificate"),
        ({**TLS, "tls_certificate": "missing"}, "cannot read the TLS certificate .*missing: No such file"),
        ({**TLS, "tls_key": "missing"}, "cannot read the TLS key .*missing: No such file"),
        ({**TLS, "tls_client_ca": "missing"}, "cannot read the TLS client CA .*missing: No such file"),
        ({**TLS, "tls_certificate": "text"}, "TLS certificate .*text holds no PEM certificate"),
        ({**TLS, "tls_key": "text"}, "TLS key .*text is no PEM private key"),
        ({**TLS, "tls_key": "certificate"}, "TLS key .*certificate is no PEM private key"),
        ({**TLS, "tls_client_ca": "key"}, "TLS client CA .*key holds no PEM certificate"),
        ({**TLS, "tls_key": "other_key"}, "TLS key .*other_key is not the key of the certificate .*certificate"),
        ({"token_file": "missing"}, "cannot read the token file"),
    ],
)
def test_wrong_files_are_named(files: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    """A server does not start with files that it cannot use, and says which."""
    with pytest.raises(ConfigError, match=message):
        security(files, **settings)


def test_key_that_others_can_read_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    """A private key is as secret as a token."""
    key = tmp_path / "key"
    key.write_bytes(files["key"].read_bytes())
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"TLS key .*mode 0644"):
        security(files, tls_certificate="certificate", tls_key=key)


def test_encrypted_key_is_refused(tmp_path: Path) -> None:
    """A server asks nobody for a password."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = f"openssl req -x509 -newkey rsa:2048 -passout pass:word -keyout {key} -out {certificate} -subj /CN=a"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted"):
        ServerSecurity(SecurityConfig(tls_certificate=certificate, tls_key=key))


def test_wrong_publish_settings_show_no_token() -> None:
    """What is wrong about the server that a trainer publishes to is told without the token for it."""
    target = {"address": "example.org:7433", "token": "0123456789abcdef"}
    with pytest.raises(ConfigError, match="would travel in plain text") as caught:
        make_trainer_config({"publish_root": Path("published"), "target": target})
    assert target["token"] not in str(caught.value)


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:10.0.0.7:51234", "10.0.0.7"),
        ("ipv6:%5B::1%5D:51234", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:51234", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:51234", "10.0.0.7"),
        ("unix:", "unix:"),
        ("what:ever", "what:ever"),
        ("ipv4:nonsense", "ipv4:nonsense"),
    ],
)
def test_clients_without_a_name_are_told_apart_by_address(peer: str, name: str) -> None:
    """The port is another for each connection and does not count; nor does what an IPv6 client can choose freely."""
    assert address_name(peer) == name


def test_headers_of_other_protocols_are_checked_alike(files: dict[str, Path]) -> None:
    """Where there are tokens, one of them is needed, whatever its role; without tokens nothing is."""
    made = security(files, token_file="tokens")
    made.check_bearer(["Bearer fedcba9876543210"])
    for headers in ([], ["Bearer 0000000000000000"], ["Basic fedcba9876543210"], ["Bearer 0123456789abcdef"] * 2):
        with pytest.raises(UnauthenticatedError):
            made.check_bearer(headers)
    security(files).check_bearer([])
