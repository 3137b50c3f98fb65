"""Serves metrics over HTTP on a port of its own, from threads of its own: it answers while everything else is busy."""

from __future__ import annotations

import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from treadle_server.config import SecurityConfig
from treadle_server.errors import ConfigError, UnauthenticatedError
from treadle_server.service.address import join_address
from treadle_server.service.security.server_security import ServerSecurity
from treadle_server.service.security.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)
_PATH: Final = "/metrics"
# Scrapers come one at a time; whoever opens more connections than this, or dawdles, is hung up on.
_MAX_CONNECTIONS: Final = 8
_TIMEOUT_S: Final = 10.0


class MetricsServer:
    """Answers GET /metrics on the host of the server, with its certificate and for holders of its tokens, if any.

    Raises:
        ConfigError: the port is taken, or the certificate cannot be used.
    """

    def __init__(
        self, registry: CollectorRegistry, config: SecurityConfig, port: int, security: ServerSecurity
    ) -> None:
        files = config.tls_certificate, config.tls_key, config.tls_client_ca
        tls = None if files[0] is None else _Tls(files[0], *files[1:])
        kind = _Server6 if ":" in config.host else _Server
        try:
            self._server = kind((config.host.strip("[]"), port), partial(_Handler, registry, security), tls)
        except OSError as error:
            address = join_address(config.host, port)
            raise ConfigError(f"cannot listen on {address} for metrics: {error.strerror or error}") from error
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{join_address(config.host, self._server.server_address[1])}{_PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="treadle-metrics", daemon=True)
        self._thread.start()
        _LOG.info("metrics are at %s", self.url)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Tls:
    """The TLS of the gRPC port, made anew when a file changes. Belongs to one thread.

    Raises:
        ConfigError: the files cannot be used when the server starts.
    """

    def __init__(self, certificate: Path, key: Path | None, client_ca: Path | None) -> None:
        self._files = certificate, key, client_ca
        self._watched = WatchedFiles([path for path in self._files if path is not None])
        try:
            self._context = self._make()
        except OSError as error:
            raise ConfigError(f"cannot use the TLS files for metrics: {error.strerror or error}") from error

    @property
    def context(self) -> ssl.SSLContext:
        """What the files hold now; files that cannot be used leave it as it was."""
        if self._watched.changed():
            try:
                self._context = self._make()
            except OSError as error:
                _LOG.error("the certificate for metrics stays as it was: %s", error.strerror or error)
        return self._context

    def _make(self) -> ssl.SSLContext:
        certificate, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class _Server(socketserver.ThreadingTCPServer):
    """Handles a few connections at a time."""

    allow_reuse_address = True  # connections of a server that has ended do not keep the port
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Callable[..., _Handler], tls: _Tls | None) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._tls = tls
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls is not None:  # the handshake is for the connection's own thread
            connection = self._tls.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is nothing to report."""
        _LOG.debug("a connection for metrics failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """One connection: one request, one answer."""

    timeout = _TIMEOUT_S
    server_version = "treadle"
    sys_version = ""

    def __init__(self, registry: CollectorRegistry, security: ServerSecurity, *connection: Any) -> None:
        self._registry = registry
        self._security = security
        super().__init__(*connection)

    def handle(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().handle()

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self.send_error(404, f"only {_PATH} is here")
            return
        try:
            self._security.check_bearer(self.headers.get_all("Authorization") or ())
        except UnauthenticatedError as error:
            self.send_error(401, str(error))
            return
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        body = encode(self._registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name in the base class
        """Say nothing: scrapes come every few seconds."""
