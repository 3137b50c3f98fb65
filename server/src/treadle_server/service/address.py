"""Addresses to listen on, and why one cannot be had."""

from __future__ import annotations

import errno
import socket

from treadle_server.errors import ConfigError


def join_address(host: str, port: int) -> str:
    """Return host:port, with the brackets that an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listen_error(host: str, port: int, error: Exception) -> ConfigError:
    """Return the error that says why nothing can listen there: the system's reason, if it has one, else gRPC's."""
    return ConfigError(f"cannot listen on {join_address(host, port)}: {_listen_problem(host, port) or error}")


def _listen_problem(host: str, port: int) -> str:
    """Return the system's reason, such as "Address already in use", and what to do; gRPC only says that it failed."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{error.strerror}; choose another with --port (0: any free one)"
        return error.strerror or str(error)
    return ""
