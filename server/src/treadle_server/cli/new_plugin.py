"""`treadle new-plugin`: writes the project of a plugin."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from treadle_server.cli.options import Json
from treadle_server.cli.output import write, write_json


def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of its sampler stage: lower-case letters, digits and underscores.")],
    directory: Annotated[Path, typer.Option(help="Where to make its folder.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a plugin of your own to start from: a project with one sampler stage and tests that pass."""
    from treadle_server.plugins.manager import PluginManager
    from treadle_server.plugins.new_plugin import write_plugin

    folder = write_plugin(name, directory, taken=PluginManager.load().registry)
    if as_json:
        write_json({"name": name, "folder": str(folder)})
    else:
        steps = f"cd {shlex.quote(str(folder))} && pip install -e . && pytest && treadle plugins --check"
        write(f"wrote {folder}; next: {steps}\n")
