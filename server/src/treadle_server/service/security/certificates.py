"""TLS: the server's certificate, read again when its files change."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from treadle_server.errors import ConfigError
from treadle_server.service.security.watched_files import WatchedFiles, read_file

_LOG = logging.getLogger(__name__)
_MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """PEM files: the server's certificate with its chain, its key, and who signs clients' certificates (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class Certificates:
    """What the files hold, for gRPC.

    New connections get what the files hold now: they are looked at once a second at most. Files that cannot be used, or
    of which only one has been replaced so far, leave things as they were, and the log says so.

    Raises:
        ConfigError: the files cannot be used when the server starts; names the file.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._watched = WatchedFiles([path for path in (files.certificate, files.key, files.client_ca) if path])
        self._current = self._read()
        self._must_reload = False

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a secure port needs."""
        mutual = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._current, self._renewed, require_client_authentication=mutual)

    def reload(self) -> None:
        """Read the files for the next connection, whether they have changed or not."""
        self._must_reload = True

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, None if it is the old one. gRPC asks for each connection, in threads of its."""
        with self._lock:
            if not self._watched.changed() and not self._must_reload:
                return None
            self._must_reload = False
            try:
                self._current = self._read()
            except ConfigError as error:
                _LOG.error("the certificate stays as it was: %s", error)
                return None
            _LOG.info("read the certificate %s", self._files.certificate)
            return self._current

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        before = self._watched.stamp()
        certificate = read_file(files.certificate, "TLS certificate", _MAX_FILE_BYTES, secret=False)
        key = read_file(files.key, "TLS key", _MAX_FILE_BYTES, secret=True)
        client_ca = files.client_ca and read_file(files.client_ca, "TLS client CA", _MAX_FILE_BYTES, secret=False)
        _check_pair(files.certificate, files.key)
        if files.client_ca is not None:
            _check_authority(files.client_ca)
        if self._watched.stamp() != before:  # what was checked may not be what was read
            raise ConfigError(f"the TLS files beside {files.certificate} changed while they were read")
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)


def _check_pair(certificate: Path, key: Path) -> None:
    """Refuse files that are no certificate and its key: gRPC would start with them and fail each handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _check_authority(certificate, what="TLS certificate")
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the TLS key {key} is not the key of the certificate {certificate}") from error
        raise ConfigError(f"the TLS key {key} is no PEM private key") from error
    except OSError as error:
        raise ConfigError(f"cannot read the TLS key {key}: {error.strerror or error}") from error


def _refuse_password() -> str:
    raise ConfigError("the TLS key is encrypted; a server has nobody to ask for the password")


def _check_authority(path: Path, what: str = "TLS client CA") -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"the {what} {path} holds no PEM certificate") from error
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror or error}") from error
