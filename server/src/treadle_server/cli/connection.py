"""The client that a command talks through: to a running server, or to one in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from treadle_server.cli.failure import client_failures
from treadle_server.cli.options import ServerFlags
from treadle_server.cli.progress import spinner
from treadle_server.cli.security import ConnectionFlags

if TYPE_CHECKING:
    from treadle_client import Client


# What an adapter is called in a server of this process.
_OWN_ADAPTER = "adapter"


def adapter_keywords(target: str | None, adapter: str | None) -> dict[str, str]:
    """Return the keyword of a request for an adapter: its name at the target, or the one that `connected` loads."""
    return {} if adapter is None else {"adapter": _OWN_ADAPTER if target is None else adapter}


@contextmanager
def connected(
    target: str | None, model: str, flags: ServerFlags, connection: ConnectionFlags, adapter: str | None = None
) -> Iterator[Client]:
    """Lend a client of the server at `target`, or of one that is started here for `model` and stopped afterwards.

    The folder `adapter` is loaded into the latter.
    """
    from treadle_client import Client

    if target is None:
        connection.refuse_without_target()
    else:
        flags.refuse_beside_target()
    with ExitStack() as stack:
        address = stack.enter_context(_own_server(model, flags, adapter)) if target is None else target
        stack.enter_context(client_failures(address))
        yield stack.enter_context(Client(address) if target is None else connection.client(target))


@contextmanager
def _own_server(model: str, flags: ServerFlags, adapter: str | None) -> Iterator[str]:
    from treadle_server.config import load_config
    from treadle_server.service.embedded import embedded_server
    from treadle_server.service.startup import find_models

    adapters = {} if adapter is None else {find_models([model])[0].name: {_OWN_ADAPTER: adapter}}
    config = load_config(None, {"port": 0, "adapters": adapters, **flags.settings()})
    with ExitStack() as stack:
        with spinner(f"loading {model}"):
            address = stack.enter_context(embedded_server([model], config))
        yield address
