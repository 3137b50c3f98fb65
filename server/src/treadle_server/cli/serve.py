"""`treadle serve`: serves models until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle_server.cli.observing import ObservingFlags, keep_responsive
from treadle_server.cli.options import Json, ServerFlags
from treadle_server.cli.output import write, write_json
from treadle_server.cli.progress import spinner
from treadle_server.cli.security import SecurityFlags, reloading_on_hangup
from treadle_server.cli.signals import first_signal, run_unless
from treadle_server.cli.trainer_process import (
    WithTrainerFlags,
    publish_root,
    running_trainer,
    trainer_arguments,
)

if TYPE_CHECKING:
    from treadle_server.config import ServerConfig
    from treadle_server.service.app import InferenceServer
    from treadle_server.service.startup import ModelSource

_LOG = logging.getLogger(__name__)
_LIMITS = "Limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFlags:
    """The limits that most servers want to set; the configuration file has all of them."""

    max_running: Annotated[int | None, typer.Option(help="Sequences that share a step.", rich_help_panel=_LIMITS)] = (
        None
    )
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Requests that may wait, a model.", rich_help_panel=_LIMITS)
    ] = None
    max_kv_bytes: Annotated[
        int | None, typer.Option(help="Memory for keys and values in bytes, a model.", rich_help_panel=_LIMITS)
    ] = None
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace", metavar="SECONDS", help="Time that requests get to finish at shutdown.", rich_help_panel=_LIMITS
        ),
    ] = None


def serve(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names or folders, each optionally NAME= in front.")
    ],
    server: ServerFlags,
    limits: LimitFlags,
    security: SecurityFlags,
    observing: ObservingFlags,
    trainer: WithTrainerFlags,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on (7433); 0 takes a free one.")
    ] = None,
    model_root: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Folder under which RPCs may name models, weights and adapters; repeatable."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL:]NAME=DIR", help="LoRA adapter to load, by name and folder; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of settings; options here override it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve models until SIGTERM or Ctrl-C, then let requests finish; a second signal exits at once.

    One line on stdout tells the address when it serves; the log goes to stderr.
    """
    from treadle_server.config import load_config
    from treadle_server.service.startup import check_adapters, find_adapters, find_models

    observing.start_log()
    given = {f: getattr(limits, f) for f in limits.__slots__} | observing.settings()
    sources = find_models(models)
    given |= {"model_roots": model_root or None, "adapters": find_adapters(adapter or (), sources) or None}
    settings = load_config(config, {"host": host, "port": port, **server.settings(), **security.settings(), **given})
    check_adapters(settings, sources)
    _check_roots(settings.model_roots)
    trainer.check(settings, sources[0].folder if len(sources) == 1 else None)
    alike = [*observing.arguments_of_another(), *(trainer.trainer_option or ())]
    asyncio.run(_serve_beside(replace(trainer, trainer_option=alike), settings, sources, as_json=as_json))


def _check_roots(roots: Sequence[Path]) -> None:
    from treadle_server.errors import ConfigError

    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"--model-root {root} is not a folder; create it first")


async def _serve_beside(
    flags: WithTrainerFlags, config: ServerConfig, sources: Sequence[ModelSource], *, as_json: bool
) -> None:
    """Serve, with a folder for a trainer's weights if there is to be one."""
    if not flags.with_trainer:
        await _serve(config, sources, None, as_json=as_json)
        return
    async with publish_root(config.model_roots, sources[0].name) as root:
        config = config.model_copy(update={"model_roots": (*config.model_roots, root)})
        start = partial(trainer_arguments, flags, config, sources[0], root)
        await _serve(config, sources, start, as_json=as_json)


async def _serve(
    config: ServerConfig,
    sources: Sequence[ModelSource],
    trainer_of: Callable[[int], list[str]] | None,
    *,
    as_json: bool,
) -> None:
    """Listen, load, serve, drain. A signal while it loads ends it without more ado.

    `trainer_of` returns the command line of a trainer that publishes to this server's port.
    """
    from treadle_server.service.app import InferenceServer
    from treadle_server.service.startup import load_plugins

    signalled = first_signal()
    server = InferenceServer(config, load_plugins(config))
    keep_responsive()
    async with AsyncExitStack() as beside:  # the trainer ends while the server drains, and is waited for last
        try:
            port = await server.start()
            reloading_on_hangup(server.security.reload)
            if await _load(server, sources, signalled):
                trainer = None
                if trainer_of is not None:
                    running = running_trainer(trainer_of(port), config.grace_s, server.report_trainer)
                    trainer = await beside.enter_async_context(running)
                beside_it = {
                    "trainer": trainer.address if trainer else None,
                    "metrics": server.observability.metrics_url,
                }
                _announce(config.host, port, [source.name for source in sources], beside_it, as_json=as_json)
                await signalled.wait()
                _LOG.info("draining: requests have %g s to finish; another signal exits at once", config.grace_s)
                if trainer is not None:
                    trainer.terminate()
        finally:
            await server.stop()
    _LOG.info("stopped")


async def _load(server: InferenceServer, sources: Sequence[ModelSource], signalled: asyncio.Event) -> bool:
    """Load the models in a thread and open the server; False when a signal came first."""
    from treadle_server.service.startup import load_models

    with spinner("loading " + ", ".join(source.name for source in sources)):
        loaded = await run_unless(signalled, lambda: load_models(server, sources))
    if loaded is None:
        return False
    for model in loaded.result():
        server.models.add(model)
    await server.open()
    return True


def _announce(
    host: str, port: int, names: Sequence[str], beside_it: Mapping[str, str | None], *, as_json: bool
) -> None:
    """Tell the addresses of what serves; those of None are left out."""
    from treadle_server.service.address import join_address

    address = join_address(host, port)
    if as_json:
        beside = {name: where for name, where in beside_it.items() if where is not None}
        write_json({"address": address, "host": host, "port": port, "models": names, **beside})
        return
    write(f"treadle serves {', '.join(names)} at {address}\n")
    if beside_it["trainer"] is not None:
        write(f"treadle trains {names[0]} at {beside_it['trainer']}\n")
    if beside_it["metrics"] is not None:
        write(f"treadle shows metrics at {beside_it['metrics']}\n")
