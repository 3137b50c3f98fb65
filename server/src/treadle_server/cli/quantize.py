"""`treadle quantize`: writes a model with its large matrices rounded to eight or four bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from treadle_server.cli.options import Json, NoPlugins, PluginDirs
from treadle_server.cli.output import format_bytes, write, write_json
from treadle_server.cli.progress import progress_bar


def quantize(
    model: Annotated[str, typer.Argument(help="A name that `treadle models` lists, or a folder.")],
    out: Annotated[Path, typer.Option(help="New folder to write to.")],
    to: Annotated[Literal["int8", "int4"], typer.Option(help="Bits of a number.")] = "int8",
    plugin_dir: PluginDirs = None,
    no_plugin: NoPlugins = None,
    as_json: Json = False,
) -> None:
    """Round a model's large matrices to eight or four bits, and write it to a folder that loads like the model."""
    from treadle_server.checkpoints.quantising import save_quantised
    from treadle_server.checkpoints.store import ModelStore
    from treadle_server.plugins.manager import PluginManager

    plugins = PluginManager.load(tuple(plugin_dir or ()), tuple(no_plugin or ()))
    with progress_bar() as progress:
        num_bytes = save_quantised(ModelStore().resolve(model), out, to, plugins.families, progress)
    if as_json:
        write_json({"folder": str(out), "dtype": to, "num_bytes": num_bytes})
    else:
        write(f"wrote {out}: {to}, {format_bytes(num_bytes)}\n")
