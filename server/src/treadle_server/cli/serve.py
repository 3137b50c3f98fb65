"""`treadle serve`: serves models until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from treadle_server.cli.options import Json, ServerFlags
from treadle_server.cli.output import write, write_json
from treadle_server.cli.progress import spinner

if TYPE_CHECKING:
    from treadle_server.config import ServerConfig
    from treadle_server.service.app import InferenceServer
    from treadle_server.service.startup import ModelSource

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
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
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7433); 0 takes a free one.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of settings; options here override it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve models until SIGTERM or Ctrl-C, then let requests finish; a second signal exits at once.

    One line on stdout tells the address when it serves; the log goes to stderr.
    """
    from treadle_server.config import load_config
    from treadle_server.service.startup import find_models

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {f: getattr(limits, f) for f in limits.__slots__}
    settings = load_config(config, {"host": host, "port": port, **server.settings(), **given})
    sources = find_models(models)
    asyncio.run(_serve(settings, sources, as_json=as_json))


async def _serve(config: ServerConfig, sources: Sequence[ModelSource], *, as_json: bool) -> None:
    """Listen, load, serve, drain. A signal while it loads ends it without more ado."""
    from treadle_server.service.app import InferenceServer
    from treadle_server.service.startup import load_plugins

    signalled = _signalled()
    server = InferenceServer(config, load_plugins(config))
    try:
        port = await server.start()
        if await _load(server, sources, signalled):
            _announce(config.host, port, [source.name for source in sources], as_json=as_json)
            await signalled.wait()
            _LOG.info("draining: requests have %g s to finish; another signal exits at once", config.grace_s)
    finally:
        await server.stop()
    _LOG.info("stopped")


def _signalled() -> asyncio.Event:
    """Return what the first SIGTERM or SIGINT sets; a second one ends the process where it stands."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        loop.call_soon_threadsafe(event.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
    return event


async def _load(server: InferenceServer, sources: Sequence[ModelSource], signalled: asyncio.Event) -> bool:
    """Load the models in a thread and open the server; False when a signal came first."""
    from treadle_server.service.startup import load_models

    with spinner("loading " + ", ".join(source.name for source in sources)):
        loading = asyncio.ensure_future(_in_daemon_thread(lambda: load_models(server, sources)))
        waiting = asyncio.ensure_future(signalled.wait())
        await asyncio.wait({loading, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if signalled.is_set():
        loading.cancel()
        return False
    for model in loading.result():
        server.models.add(model)
    await server.open()
    return True


def _in_daemon_thread(function: Callable[[], _T]) -> Awaitable[_T]:
    """Run a function in a thread that does not keep the process alive when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def resolve(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None is then what the function returned

    def run() -> None:
        try:
            outcome: tuple[_T | None, BaseException | None] = (function(), None)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
            outcome = (None, error)
        loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=run, name="treadle-loading", daemon=True).start()
    return future


def _announce(host: str, port: int, names: Sequence[str], *, as_json: bool) -> None:
    from treadle_server.service.address import join_address

    address = join_address(host, port)
    if as_json:
        write_json({"address": address, "host": host, "port": port, "models": names})
    else:
        write(f"treadle serves {', '.join(names)} at {address}\n")
