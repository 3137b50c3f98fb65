"""The client that a command talks through: to a running server, or to one in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from treadle_server.cli.failure import client_failures
from treadle_server.cli.options import ServerFlags
from treadle_server.cli.progress import spinner

if TYPE_CHECKING:
    from treadle_client import Client


@contextmanager
def connected(target: str | None, model: str, flags: ServerFlags) -> Iterator[Client]:
    """Lend a client of the server at `target`, or of one that is started here for `model` and stopped afterwards."""
    from treadle_client import Client

    if target is not None:
        flags.refuse_beside_target()
    with ExitStack() as stack:
        address = stack.enter_context(_own_server(model, flags)) if target is None else target
        stack.enter_context(client_failures(address))
        yield stack.enter_context(Client(address))


@contextmanager
def _own_server(model: str, flags: ServerFlags) -> Iterator[str]:
    from treadle_server.config import load_config
    from treadle_server.service.embedded import embedded_server

    config = load_config(None, {"port": 0, **flags.settings()})
    with ExitStack() as stack:
        with spinner(f"loading {model}"):
            address = stack.enter_context(embedded_server([model], config))
        yield address
