"""Options about who may reach whom: those of a server, and those of a client that talks to one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from treadle_server.cli.failure import wrong_use
from treadle_server.cli.options import given_fields

if TYPE_CHECKING:
    from treadle_client import Client, TlsOptions

TOKEN_VARIABLE: Final = "TREADLE_TOKEN"  # noqa: S105 - the name of a variable
_MAX_TOKEN_BYTES: Final = 8192  # more than any header takes
_SECURITY: Final = "Security"
_CONNECTION: Final = "Connection to --target"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFlags:
    """Who may reach a server, and do what there."""

    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate and its chain: speak TLS.", rich_help_panel=_SECURITY),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate.", rich_help_panel=_SECURITY)
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM of who signs clients' certificates: refuse clients without one (mutual TLS).",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Bearer tokens, one a line: [NAME] user|admin TOKEN. Callers need one of them.",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond this machine in plain text.", rich_help_panel=_SECURITY),
    ] = False
    max_requests_per_client: Annotated[
        int | None,
        typer.Option(help="Requests that a client may have under way; no limit if unset.", rich_help_panel=_SECURITY),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return what was given, as settings of SecurityConfig."""
        return {
            "tls_certificate": self.tls_cert,
            "tls_key": self.tls_key,
            "tls_client_ca": self.tls_client_ca,
            "token_file": self.token_file,
            "insecure": self.insecure or None,
            "max_requests_per_client": self.max_requests_per_client,
        }


def reloading_on_hangup(reload: Callable[[], None]) -> None:
    """Let SIGHUP read tokens and certificates again, in the event loop that runs; where there is no SIGHUP, nothing."""
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """How to speak to the server at --target. Its token is also taken from the variable TREADLE_TOKEN."""

    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="Speak TLS and trust the usual authorities; --tls-ca implies it.", rich_help_panel=_CONNECTION
        ),
    ] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM of who signs the server's certificate.", rich_help_panel=_CONNECTION),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate of this client (mutual TLS).", rich_help_panel=_CONNECTION),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM key of that certificate.", rich_help_panel=_CONNECTION)
    ] = None
    tls_server_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name in the server's certificate, where it is not the target's host.",
            rich_help_panel=_CONNECTION,
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File that holds the token and nothing else; wins over {TOKEN_VARIABLE}.",
            rich_help_panel=_CONNECTION,
        ),
    ] = None

    def client(self, target: str) -> Client:
        """Return a client of the server at `target`."""
        from treadle_client import Client, InvalidArgumentError

        tls, token = self._tls(), read_token("--token-file", self.token_file)
        try:
            return Client(target, tls=tls, token=token)
        except InvalidArgumentError as error:
            if token is not None and tls is None and any("TLS" in message for _, message in error.violations):
                message = f"a token for {target} would travel in plain text; add --tls, or --tls-ca FILE"
                raise wrong_use(message) from None
            raise

    def refuse_without_target(self) -> None:
        """Refuse every given option where no running server is named."""
        for name in given_fields(self):
            raise wrong_use(f"--{name.replace('_', '-')} is about a running server and needs --target")

    def _tls(self) -> TlsOptions | None:
        from treadle_client import TlsOptions

        if (self.tls_cert is None) != (self.tls_key is None):
            raise wrong_use("--tls-cert and --tls-key go together")
        if not given_fields(self).keys() - {"token_file"}:
            return None
        return TlsOptions(
            root_certificates=_pem("--tls-ca", self.tls_ca),
            certificate_chain=_pem("--tls-cert", self.tls_cert),
            private_key=_pem("--tls-key", self.tls_key),
            server_name=self.tls_server_name,
        )


def read_token(option: str, path: Path | None) -> str | None:
    """Return the token that a file holds, or the one in the environment without a file; None where there is none."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    with path.open("rb") as file:
        words = file.read(_MAX_TOKEN_BYTES).split()
    if len(words) != 1 or not words[0].isascii():
        raise wrong_use(f"{option} {path} must hold the token and nothing else")
    return words[0].decode("ascii")


def _pem(option: str, path: Path | None) -> bytes | None:
    """Return what a PEM file holds; gRPC would say nothing of one that is none."""
    if path is None:
        return None
    content = path.read_bytes()
    kind = "PRIVATE KEY" if option == "--tls-key" else "CERTIFICATE"
    if f"{kind}-----".encode() not in content:
        raise wrong_use(f"{option} {path} holds no PEM {kind.lower()}")
    return content
