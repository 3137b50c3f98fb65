"""The commands of `treadle`, put together. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from treadle_server.cli.chat import chat
from treadle_server.cli.command import Command, prepare
from treadle_server.cli.explain import explain
from treadle_server.cli.failure import reported_failures
from treadle_server.cli.generate import generate
from treadle_server.cli.models import models
from treadle_server.cli.new_plugin import new_plugin
from treadle_server.cli.plugins import plugins
from treadle_server.cli.pull import pull
from treadle_server.cli.quantize import quantize
from treadle_server.cli.serve import serve
from treadle_server.cli.streams import prepare_streams
from treadle_server.cli.train import train
from treadle_server.cli.trainer import trainer


def run() -> None:
    """Run the command that the arguments name, and exit with its status."""
    # gRPC's C core logs each refused connection and taken port; the commands say it themselves, in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    prepare_streams()
    with reported_failures():
        make_app()(prog_name="treadle")


def make_app() -> typer.Typer:
    """Make the command line application."""
    app = typer.Typer(
        help="Serve language models over gRPC, stream text from them, and plug in samplers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for command in (generate, chat, explain, serve, train, trainer, models, pull, quantize, plugins, new_plugin):
        app.command(cls=Command)(prepare(command))
    return app


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


def _show_version(given: bool) -> None:
    if given:
        from treadle_server.version import VERSION

        typer.echo(f"treadle {VERSION}")
        raise typer.Exit
