"""Where the server is and how to reach it: target, TLS, token, limits; and the stubs over an open channel."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
from treadle_protos.v1 import (
    generation_pb2_grpc,
    model_pb2_grpc,
    sampler_pb2_grpc,
    server_pb2_grpc,
    trace_pb2_grpc,
    training_pb2_grpc,
)

from treadle_client._exceptions import InvalidArgumentError, Violation
from treadle_client._fields import refuse, to_float, to_int
from treadle_client._peer import SERVER, Kind, Peer, checked_target, host_of
from treadle_client._retry import Attempts

DEFAULT_TARGET: Final = "127.0.0.1:7433"
DEFAULT_TRAINER_TARGET: Final = "127.0.0.1:7434"
DEFAULT_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
_MAX_INT32: Final = 2**31 - 1  # gRPC holds message limits in 32 bits
_MAX_TIMEOUT_S: Final = 1e9  # gRPC's clock overflows far above; 31 years are as good as none
_HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"  # HealthCheckResponse{status: SERVING}: the client needs no generated code for two bytes

Pem: TypeAlias = bytes | str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How to speak TLS. Each certificate or key is PEM as bytes, or the path of a PEM file.

    Attributes:
        root_certificates: authorities to trust; the ones that gRPC brings when None.
        certificate_chain: the client's own certificate, for servers that ask for one.
        private_key: the key of that certificate.
        server_name: name that the server's certificate must carry, where it is not the target's host.
    """

    root_certificates: Pem | None = None
    certificate_chain: Pem | None = None
    private_key: Pem | None = field(default=None, repr=False)
    server_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The checked arguments of a client.

    Raises:
        InvalidArgumentError: for a value of the wrong type or range, and for a token that would travel in the clear.
    """

    target: str
    token: str | None = field(repr=False)
    tls: TlsOptions | None
    timeout_s: float | None
    retries: int
    max_message_bytes: int
    kind: Kind = SERVER

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", checked_target(self.target, self.kind.default_port))
        if self.tls is not None and not isinstance(self.tls, TlsOptions):
            raise refuse("tls", "TlsOptions or None", self.tls)
        to_int(self.retries, "retries", (0, _MAX_INT32))
        to_int(self.max_message_bytes, "max_message_bytes", (1, _MAX_INT32))
        check_timeout(self.timeout_s)
        if self.token is not None:
            _check_token(self.token, safe=self.tls is not None or is_loopback(self.target))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call: the token, where there is one."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def _peer(self) -> Peer:
        name = self.tls.server_name if self.tls is not None else None
        return Peer(self.target, name or host_of(self.target), self.kind)

    def attempts(self, timeout_s: float | None, clock: Callable[[], float], retries: int | None = None) -> Attempts:
        """Start to count the tries and seconds of one call; None takes the client's own timeout, or retries."""
        given = self.timeout_s if timeout_s is None else timeout_s
        allowed = self.retries if retries is None else retries
        return Attempts(retries=allowed, timeout_s=check_timeout(given), clock=clock, peer=self._peer)

    def open(self, grpc_module: Any) -> Any:
        """Open the channel, of `grpc` or of `grpc.aio`."""
        if self.tls is None:
            return grpc_module.insecure_channel(self.target, options=self._channel_options())
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_pem(self.tls.root_certificates, "tls.root_certificates"),
            private_key=_pem(self.tls.private_key, "tls.private_key"),
            certificate_chain=_pem(self.tls.certificate_chain, "tls.certificate_chain"),
        )
        return grpc_module.secure_channel(self.target, credentials, options=self._channel_options())

    def _channel_options(self) -> list[tuple[str, object]]:
        options: list[tuple[str, object]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", 30_000),  # the server allows a ping every 10 s
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing for minutes
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5_000),
        ]
        if is_loopback(self.target):
            options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's loopback
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def check_timeout(timeout_s: float | None) -> float | None:
    """Return a timeout in seconds, None for no limit; infinity is no limit."""
    if timeout_s is None:
        return None
    value = to_float(timeout_s, "timeout_s")
    if math.isnan(value) or value < 0:
        raise refuse("timeout_s", "0 or more seconds", timeout_s)
    return value if value < _MAX_TIMEOUT_S else None


def is_loopback(target: str) -> bool:
    """Whether a gRPC target names this machine only: 127.x.x.x, localhost, ::1, or a Unix socket."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_of(target)
    return host in {"localhost", "::1"} or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _check_token(token: object, *, safe: bool) -> None:
    """Refuse a token that no header can carry or that anyone on the way could read; the text never shows it."""
    if not isinstance(token, str) or re.fullmatch(r"[!-~]+", token) is None:
        raise InvalidArgumentError.of([Violation("token", "expected a text of visible ASCII characters")])
    if not safe:
        message = "a token goes over TLS or to this machine only; give tls=TlsOptions(...)"
        raise InvalidArgumentError.of([Violation("token", message)])


def _pem(source: Pem | None, field_name: str) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise InvalidArgumentError.of([Violation(field_name, str(error))]) from error


class Stubs:
    """The generated stubs of every service over one channel, synchronous or not, and the health check."""

    def __init__(self, channel: Any) -> None:
        def over_channel(stub: Any) -> Any:
            return stub(channel)

        self.generation = over_channel(generation_pb2_grpc.GenerationServiceStub)
        self.model = over_channel(model_pb2_grpc.ModelServiceStub)
        self.sampler = over_channel(sampler_pb2_grpc.SamplerServiceStub)
        self.server = over_channel(server_pb2_grpc.ServerServiceStub)
        self.trace = over_channel(trace_pb2_grpc.TraceServiceStub)
        self.training = over_channel(training_pb2_grpc.TrainingServiceStub)
        self.health_check = channel.unary_unary(_HEALTH_CHECK)


def says_serving(reply: bytes) -> bool:
    """Whether the bytes of a HealthCheckResponse say SERVING."""
    return reply == _SERVING
