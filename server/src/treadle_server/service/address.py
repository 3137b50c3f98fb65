"""Addresses to listen on, and why one cannot be had."""

from __future__ import annotations

import socket


def join_address(host: str, port: int) -> str:
    """Return host:port, with the brackets that an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listen_problem(host: str, port: int) -> str:
    """Return the system's reason why nothing can listen there, such as "Address already in use"; empty if it has none.

    gRPC itself only says that it failed.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""
