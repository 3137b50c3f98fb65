"""Who reaches a server and what they may do there: TLS, tokens, roles, limits a client. Every server uses it."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import grpc

from treadle_server.config import SecurityConfig
from treadle_server.errors import AccessDeniedError, ConfigError, UnauthenticatedError
from treadle_server.service.address import join_address, listen_error
from treadle_server.service.security.certificates import CertificateFiles, Certificates
from treadle_server.service.security.client_limits import ClientLimits
from treadle_server.service.security.permissions import Role, role_needed
from treadle_server.service.security.tokens import Caller, TokenFile

_LOG = logging.getLogger(__name__)
_SCHEME: Final = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_IPV6_SITE_BITS: Final = 64  # an IPv6 client has at least such a network of addresses to itself


class ServerSecurity:
    """The security of one server, from its settings.

    Raises:
        ConfigError: a file cannot be used, settings do not go together, or the address is open to others without
            anything to protect it.
    """

    def __init__(self, config: SecurityConfig) -> None:
        self._config = config
        self._loopback = is_loopback(config.host)
        _check_settings(config, loopback=self._loopback)
        self._certificates = _certificates(config)
        self._tokens = None if config.token_file is None else TokenFile(config.token_file)
        self._limits = ClientLimits(config.max_requests_per_client)
        # Without tokens: on loopback and behind mutual TLS everyone is trusted. Elsewhere nobody has said who the
        # administrator is.
        self._open_role = Role.ADMIN if self._loopback or config.tls_client_ca is not None else Role.USER

    def add_port(self, server: grpc.aio.Server, port: int) -> int:
        """Let the server listen, with TLS if there is a certificate; return the port. The log tells how it is secured.

        Raises:
            ConfigError: the address is taken or cannot be listened on.
        """
        address = join_address(self._config.host, port)
        try:
            if self._certificates is None:
                port = int(server.add_insecure_port(address))
            else:
                port = int(server.add_secure_port(address, self._certificates.credentials()))
        except RuntimeError as error:
            raise listen_error(self._config.host, port, error) from error
        self._tell(port)
        return port

    def _tell(self, port: int) -> None:
        transport = "plain text" if self._certificates is None else "TLS"
        if self._config.tls_client_ca is not None:
            transport = "mutual TLS"
        num_tokens = 0 if self._tokens is None else len(self._tokens)
        callers = f"{num_tokens or 'no'} token{'' if num_tokens == 1 else 's'}"
        _LOG.info("listening on %s with %s and %s", join_address(self._config.host, port), transport, callers)
        if self._certificates is None and not self._loopback:
            _LOG.warning("whoever is on the way to %s can read and change everything, tokens too", self._config.host)
        if self._tokens is None and self._open_role is Role.USER:
            _LOG.warning("anyone who reaches %s may use the models; only tokens make administrators", self._config.host)

    def reload(self) -> None:
        """Read the files of tokens and certificates again; those that cannot be used leave things as they were."""
        if self._tokens is not None:
            self._tokens.reload()
        if self._certificates is not None:
            self._certificates.reload()

    def identify(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return who calls; raises UnauthenticatedError where there is no token, or not one of ours."""
        if self._tokens is None:
            return Caller(_peer_name(context), self._open_role)
        headers = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        return _find(self._tokens, headers)

    def authorise(self, method: str, caller: Caller) -> None:
        """Raise AccessDeniedError if the caller may not call a method, such as `/package.Service/Method`."""
        needed = role_needed(method)
        if not caller.role.includes(needed):
            raise AccessDeniedError(f"{method} needs the role {needed}; {self._shortfall(caller)}")

    def _shortfall(self, caller: Caller) -> str:
        if self._tokens is not None:
            return f"{caller.name} has the role {caller.role}"
        return "this server has no tokens that would tell who has it (--token-file, or --tls-client-ca)"

    def place_for(self, caller: Caller) -> AbstractContextManager[None]:
        """Count a request of a caller while the block runs.

        Raises:
            QueueFullError: as many of the caller's requests as are allowed run already.
        """
        return self._limits.place_for(caller.name)

    def check_bearer(self, headers: Sequence[str]) -> None:
        """Let holders of a token pass, of any role, by the authorization headers of a request that is no RPC.

        Raises:
            UnauthenticatedError: the server has tokens, and this is none of them.
        """
        if self._tokens is not None:
            _find(self._tokens, headers)


def _check_settings(config: SecurityConfig, *, loopback: bool) -> None:
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise ConfigError("tls_certificate and tls_key go together: --tls-cert FILE --tls-key FILE")
    if config.tls_client_ca is not None and config.tls_certificate is None:
        raise ConfigError("tls_client_ca needs tls_certificate and tls_key: mutual TLS is TLS")
    if loopback or config.insecure or config.tls_certificate is not None:
        return
    what = "tokens would travel" if config.token_file is not None else "everything would travel"
    raise ConfigError(
        f"{config.host!r} can be reached from other machines, and {what} in plain text: give a certificate "
        "(--tls-cert, --tls-key), listen on 127.0.0.1, or accept it with --insecure"
    )


def _certificates(config: SecurityConfig) -> Certificates | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return Certificates(
        CertificateFiles(certificate=config.tls_certificate, key=config.tls_key, client_ca=config.tls_client_ca)
    )


def is_loopback(host: str) -> bool:
    """Whether a host to listen on can be reached from this machine only; names but localhost count as others."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _find(tokens: TokenFile, headers: Sequence[object]) -> Caller:
    caller = tokens.find(_bearer_token(headers))
    if caller is None:
        raise UnauthenticatedError("the token is none of this server's")
    return caller


def _bearer_token(headers: Sequence[object]) -> str:
    """Return the token of authorization headers; neither it nor they ever come into an error."""
    if not headers:
        raise UnauthenticatedError("a token is needed: authorization: Bearer TOKEN")
    found = _SCHEME.fullmatch(headers[0]) if len(headers) == 1 and isinstance(headers[0], str) else None
    if found is None:
        raise UnauthenticatedError("expected one header, authorization: Bearer TOKEN")
    return found[1]


def _peer_name(context: grpc.aio.ServicerContext) -> str:
    """Return what tells clients apart that have no token: the subject of the certificate, else the address."""
    for value in context.auth_context().get("x509_subject", ()):
        return bytes(value).decode("utf-8", "replace")
    return address_name(context.peer())


def address_name(peer: str) -> str:
    """Return a peer's address without its port, such as 10.0.0.7 for ipv4:10.0.0.7:51234; of IPv6 the network."""
    kind, _, rest = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return peer
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address), _IPV6_SITE_BITS), strict=False))
    return str(address)
