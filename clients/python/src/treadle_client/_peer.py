"""What a client talks to: its target, checked, and what to say when nothing or the wrong thing answers there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from treadle_client._exceptions import InvalidArgumentError, Violation
from treadle_client._fields import refuse, to_text

NOT_TRUSTED: Final = "its certificate is not trusted"
OTHER_NAME: Final = "its certificate does not carry the name"
NO_TLS: Final = "it speaks no TLS"
CLOSED: Final = "it closed the connection"
NO_ANSWER: Final = "no server answers at"
_MAX_PORT: Final = 65535
_NO_METHOD: Final = "Method not found!"  # gRPC's own words; a treadle server says more of a part that is off
_NO_CONNECTION: Final = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")


class Kind(NamedTuple):
    """Which of the two a client is for.

    Attributes:
        default_port: where it listens when nobody says otherwise.
        service: what it offers.
        other: whose port the target may be when it does not.
    """

    default_port: int
    service: str
    other: str


SERVER: Final = Kind(7433, "this service", "a trainer's")
TRAINER: Final = Kind(7434, "TrainingService", "an inference server's")


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a call goes to.

    Attributes:
        target: as it was given, with its port.
        name: what its certificate must carry.
        kind: what should be there.
    """

    target: str
    name: str
    kind: Kind

    def unreached(self, message: str) -> str:
        """Return what gRPC's text about a connection means, or the text where it is about something else."""
        if not message.startswith(_NO_CONNECTION):
            return message
        there = f"the server at {self.target} cannot be used:"
        if "CERTIFICATE_VERIFY_FAILED" in message:
            return f"{there} {NOT_TRUSTED}"
        if "Hostname Verification" in message or "verification check" in message:
            return f"{there} {OTHER_NAME} {self.name}"
        if "WRONG_VERSION_NUMBER" in message:
            return f"{there} {NO_TLS}"
        if "Socket closed" in message or "handshake failed" in message:
            return f"{there} {CLOSED}"
        return f"{NO_ANSWER} {self.target} ({_cause(message)})"

    def unimplemented(self, message: str) -> str:
        """Return what a call that nobody there knows means, or the text where the server says it."""
        if message != _NO_METHOD:
            return message
        return f"{self.target} does not offer {self.kind.service}: it may be {self.kind.other} port"


def _cause(message: str) -> str:
    """Return the last words of gRPC's text, such as `connection refused`."""
    if message.startswith("failed"):
        words = message.rpartition(": ")[2]
        return words[:1].lower() + words[1:]
    return "its host name cannot be resolved"


def checked_target(target: object, default_port: int) -> str:
    """Return a target with its port; other gRPC targets, such as `unix:/path`, stay as they are.

    Raises:
        InvalidArgumentError: it is no target, or its port none of 1 to 65535, which gRPC would take modulo 65536.
    """
    text = to_text(target, "target")
    if not text or text.isspace():
        raise refuse("target", "host:port", target)
    if re.match(r"https?://", text, re.IGNORECASE):
        scheme = text.partition("//")[0]
        raise _wrong(f"expected HOST:PORT, without {scheme}//, got {text!r:.200}")
    if re.match(r"[a-z][a-z0-9+.-]*:(/|@)|(ipv4|ipv6|dns|unix|unix-abstract|vsock):(?!\d+$)", text):
        return text
    if text.count(":") > 1 and not text.startswith("["):  # an IPv6 address without a port
        text = f"[{text}]"
    host, port = _split(text)
    if port is None:
        return f"{host}:{default_port}"
    if re.fullmatch(r"[0-9]{1,6}", port) is None or not 1 <= int(port) <= _MAX_PORT:
        raise _wrong(f"the port must be 1 to {_MAX_PORT}, got {port!r:.200}" if port else "the port is missing")
    return text


def host_of(target: str) -> str:
    """Return the host of a target: what its certificate must carry."""
    address = re.sub(r"^(dns:(//[^/]*/)?|ipv4:|ipv6:)", "", target)
    return address[1:].partition("]")[0] if address.startswith("[") else re.sub(r":\d+$", "", address)


def _split(text: str) -> tuple[str, str | None]:
    """Return host and port, None for no port; an IPv6 address keeps its brackets."""
    after = text.rpartition("]")[2]
    if ":" not in after:
        return text, None
    host, _, port = text.rpartition(":")
    return host, port


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation("target", message)])
