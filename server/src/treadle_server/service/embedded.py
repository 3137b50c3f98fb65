"""A server inside the process that uses it: its event loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from treadle_server.config import ServerConfig
from treadle_server.plugins import PluginManager
from treadle_server.service.address import join_address
from treadle_server.service.app import InferenceServer
from treadle_server.service.startup import check_adapters, find_models, load_models, load_plugins

_T = TypeVar("_T")


@contextmanager
def embedded_server(models: Sequence[str], config: ServerConfig) -> Iterator[str]:
    """Serve models until the block ends, and lend the address, such as 127.0.0.1:49152.

    Args:
        models: names or folders, each optionally `NAME=` in front.
        config: the settings; port 0 takes a free one.

    Raises:
        TreadleError: a model, a plugin or the address cannot be had; the message says why.
    """
    sources = find_models(models)
    check_adapters(config, sources)
    plugins = load_plugins(config)
    with _loop_in_thread() as loop:
        server = _run(loop, _make(config, plugins))
        try:
            port = _run(loop, server.start())
            for model in load_models(server, sources):
                server.models.add(model)
            _run(loop, server.open())
            yield join_address(config.host, port)
        finally:
            _run(loop, server.stop(grace_s=0))


@contextmanager
def _loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="treadle-server", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the loop of the other thread, and wait for it."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


async def _make(config: ServerConfig, plugins: PluginManager) -> InferenceServer:
    """Make the server on its own event loop, to which gRPC binds it."""
    return InferenceServer(config, plugins)
