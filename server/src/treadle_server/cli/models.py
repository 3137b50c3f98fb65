"""`treadle models`: lists the models on this machine, or those that a server serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle_server.cli.failure import client_failures
from treadle_server.cli.options import Json, ServedTarget
from treadle_server.cli.output import format_bytes, write_json, write_table
from treadle_server.cli.security import ConnectionFlags


def models(connection: ConnectionFlags, target: ServedTarget = None, as_json: Json = False) -> None:
    """List the models on this machine, pulled and bundled; with --target those of that server."""
    if target is not None:
        _write_served(target, connection, as_json=as_json)
        return
    connection.refuse_without_target()
    found = list(_local_models())
    if as_json:
        write_json(found)
    else:
        rows = [[m["name"], format_bytes(m["num_bytes"]), m["licence"], m["source"]] for m in found]
        write_table(["name", "size", "licence", "source"], rows)


def _local_models() -> Iterator[dict[str, Any]]:
    from treadle_server.checkpoints.store import ModelStore

    store = ModelStore()
    stored = {model.name: model for model in store.list()}
    for name in store.names():
        model = stored.get(name)
        if model is None:
            yield _bundled_model(name, store.resolve(name))
        else:
            yield {
                "name": name,
                "folder": str(model.folder),
                "source": model.source,
                "licence": model.licence,
                "num_bytes": model.num_bytes,
            }


def _bundled_model(name: str, folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {
        "name": name,
        "folder": str(folder),
        "source": "bundled",
        "licence": manifest["licence"],
        "num_bytes": manifest["num_bytes"],
    }


def _write_served(target: str, connection: ConnectionFlags, *, as_json: bool) -> None:
    with client_failures(target), connection.client(target) as client:
        served = client.list_models()
    if as_json:
        write_json(served)
    else:
        rows = [
            [m.name, m.model_type, f"{m.num_parameters:,}", str(m.context_length), m.dtype, m.backend] for m in served
        ]
        write_table(["name", "type", "parameters", "context", "dtype", "backend"], rows)
