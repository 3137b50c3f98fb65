"""`treadle trainer`: trains a model by RPC until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle_server.cli.observing import ObservingFlags, keep_responsive
from treadle_server.cli.options import Json, NoPlugins, PluginDirs, given_fields
from treadle_server.cli.output import write, write_json
from treadle_server.cli.progress import spinner
from treadle_server.cli.security import TOKEN_VARIABLE, SecurityFlags, read_token, reloading_on_hangup
from treadle_server.cli.signals import first_signal, run_unless

if TYPE_CHECKING:
    from treadle_server.service.training.app import TrainerServer
    from treadle_server.service.training.config import TrainerConfig

_LOG = logging.getLogger(__name__)
_LORA = "Adapter to train instead of the weights"
_PUBLISHING = "Publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """What is trained, and how."""

    dtype: Annotated[str | None, typer.Option(help="Number type of the arithmetic: float32 or float64.")] = None
    backend: Annotated[
        str | None, typer.Option(help="What computes: numpy, a plugin's, or auto for the fastest installed (auto).")
    ] = None
    optimizer: Annotated[str | None, typer.Option(help="adamw, sgd, lion or a plugin's (adamw).")] = None
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that never change, such as '*embed*'; repeatable."),
    ] = None
    no_decay: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that weight decay leaves alone; repeatable."),
    ] = None
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute activations again in the backward pass: less memory.")
    ] = False
    checkpoint_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the checkpoints.")] = None
    resume: Annotated[
        str | None, typer.Option(metavar="NAME", help="Checkpoint under --checkpoint-root to go on from.")
    ] = None
    grace_s: Annotated[
        float | None, typer.Option("--grace", metavar="SECONDS", help="Time that calls get to finish at shutdown.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFlags:
    """The adapter to train; none without a rank."""

    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapter.", rich_help_panel=_LORA)] = None
    lora_alpha: Annotated[
        float | None, typer.Option(help="Divided by the rank, what multiplies it (16).", rich_help_panel=_LORA)
    ] = None
    lora_target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Matrices to change, such as q_proj; repeatable.", rich_help_panel=_LORA),
    ] = None
    lora_seed: Annotated[int | None, typer.Option(help="Seed of its first values (0).", rich_help_panel=_LORA)] = None

    def settings(self) -> dict[str, Any] | None:
        """Return what was given, as LoraSettings; None for no adapter."""
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_target": "targets", "lora_seed": "seed"}
        given = {names[name]: value for name, value in given_fields(self).items()}
        return given or None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFlags:
    """The server that takes published weights. Requests never say where to publish."""

    publish_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of published weights, this trainer's own, under a --model-root of the server.",
            rich_help_panel=_PUBLISHING,
        ),
    ] = None
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Server to publish to.", rich_help_panel=_PUBLISHING)
    ] = None
    served_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its model, where it has several.", rich_help_panel=_PUBLISHING),
    ] = None
    served_adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the adapter there (trained).", rich_help_panel=_PUBLISHING),
    ] = None
    server_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File that holds an administrator's token; wins over {TOKEN_VARIABLE}.",
            rich_help_panel=_PUBLISHING,
        ),
    ] = None
    server_tls: Annotated[
        bool, typer.Option("--server-tls", help="Speak TLS with the server.", rich_help_panel=_PUBLISHING)
    ] = False
    server_tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM of who signs its certificate.", rich_help_panel=_PUBLISHING),
    ] = None
    server_tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate of this trainer.", rich_help_panel=_PUBLISHING),
    ] = None
    server_tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM key of that certificate.", rich_help_panel=_PUBLISHING)
    ] = None
    server_tls_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name in its certificate, if not its host.", rich_help_panel=_PUBLISHING),
    ] = None

    def target(self) -> dict[str, Any] | None:
        """Return what was given, as PublishTarget; None where there is no server."""
        if self.server is None:
            return None
        given = {
            "model": self.served_model,
            "adapter": self.served_adapter,
            "token": read_token("--server-token-file", self.server_token_file),
            "tls": self.server_tls,
            "tls_ca": self.server_tls_ca,
            "tls_certificate": self.server_tls_cert,
            "tls_key": self.server_tls_key,
            "tls_server_name": self.server_tls_name,
        }
        return {"address": self.server, **{name: value for name, value in given.items() if value is not None}}


def trainer(
    model: Annotated[str, typer.Argument(help="Name or folder of the model to train.")],
    training: TrainingFlags,
    lora: LoraFlags,
    publishing: PublishFlags,
    security: SecurityFlags,
    observing: ObservingFlags,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on (7434); 0 takes a free one.")
    ] = None,
    plugin_dir: PluginDirs = None,
    no_plugin: NoPlugins = None,
    exit_with_stdin: Annotated[
        bool, typer.Option("--exit-with-stdin", help="End when standard input does.", hidden=True)
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model by RPC until SIGTERM or Ctrl-C, then let calls finish; a second signal exits at once.

    One line on stdout tells the address when it takes calls; the log goes to stderr.
    """
    from treadle_server.service.training.config import make_trainer_config

    observing.start_log()
    config = make_trainer_config(
        {
            "host": host,
            "port": port,
            **given_fields(training),
            **security.settings(),
            **observing.settings(),
            "lora": lora.settings(),
            "publish_root": publishing.publish_root,
            "target": publishing.target(),
            "plugin_dirs": plugin_dir or None,
            "no_plugins": no_plugin or None,
        }
    )
    if exit_with_stdin:
        threading.Thread(target=_end_with_stdin, name="treadle-stdin", daemon=True).start()
    asyncio.run(_train(config, model, as_json=as_json))


def _end_with_stdin() -> None:
    """Wait until whoever started this process has gone, then end it as a signal would."""
    while os.read(0, 1 << 10):  # not through sys.stdin, whose lock Python wants at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


async def _train(config: TrainerConfig, model: str, *, as_json: bool) -> None:
    """Listen, load, train, drain. A signal while it loads ends it without more ado."""
    from treadle_server.service.training.app import TrainerServer

    signalled = first_signal()
    server = TrainerServer(config)
    keep_responsive()
    try:
        port = await server.start()
        reloading_on_hangup(server.security.reload)
        if await _load(server, model, signalled):
            _announce(config.host, port, model, server.observability.metrics_url, as_json=as_json)
            await signalled.wait()
            _LOG.info("draining: calls have %g s to finish; another signal exits at once", config.grace_s)
    finally:
        await server.stop()
    _LOG.info("stopped")


async def _load(server: TrainerServer, model: str, signalled: asyncio.Event) -> bool:
    """Load the model in a thread and open the server; False when a signal came first."""
    with spinner(f"loading {model}"):
        loaded = await run_unless(signalled, lambda: server.load(model))
    if loaded is None:
        return False
    await server.open(loaded.result())
    return True


def _announce(host: str, port: int, model: str, metrics: str | None, *, as_json: bool) -> None:
    from treadle_server.service.address import join_address

    address = join_address(host, port)
    if as_json:
        beside = {} if metrics is None else {"metrics": metrics}
        write_json({"address": address, "host": host, "port": port, "model": model, **beside})
        return
    write(f"treadle trains {model} at {address}\n")
    if metrics is not None:
        write(f"treadle shows metrics at {metrics}\n")
