"""`treadle explain`: shows, number by number, how a model comes to its next token."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle_server.cli.failure import WRONG_USE, CommandFailedError, wrong_use
from treadle_server.cli.output import write
from treadle_server.cli.progress import spinner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treadle_server.explain.blocks import Walk
    from treadle_server.language_model import LanguageModel

EXPLAINED_MODEL = "cat-mouse"  # bundled: the one that goes on from the document's sentence
_FEW_TOKENS = 50  # a vocabulary so small is cut to 3 by top-k, as the document does it


def explain(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to explain; without one, the handworked example and its model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=f"Name or folder of a model ({EXPLAINED_MODEL}).")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer to look into, from 0 (0).")] = None,
    head: Annotated[
        int | None, typer.Option(help="Attention head to look into, from 0; if unset the first, or both of two.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of the choice (0.7).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Tokens that top-k keeps (40; 3 of a tiny vocabulary).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share that top-p keeps (0.9).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw (0).")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures instead; it needs no other file.")
    ] = None,
) -> None:
    """Walk through a model's computation step by step, in plain words: every matrix, the attention, the choice.

    Without PROMPT it follows a document that works one sentence by hand, then the small model that continues it.
    """
    options = {
        "--model": model, "--layer": layer, "--head": head, "--temperature": temperature, "--top-k": top_k,
        "--top-p": top_p, "--seed": seed,
    }  # fmt: skip
    if prompt is None:
        for name, value in options.items():
            if value is not None:
                raise wrong_use(f"{name} needs a PROMPT to explain")
    with _loaded(model or EXPLAINED_MODEL) as lm, _refusals():
        if prompt is None:
            from treadle_server.explain.walk import document_walk

            walk = document_walk(lm)
        else:
            walk = _model_walk(lm, prompt, layer or 0, head, _knobs(lm, temperature, top_k, top_p), seed or 0)
    _show(walk) if html is None else _write_page(walk, html)


@contextmanager
def _loaded(name: str) -> Iterator[LanguageModel]:
    """Lend a model in this process."""
    from treadle_server.language_model import LanguageModel

    with spinner(f"loading {name}"):
        model = LanguageModel.load(name)
    with model:
        yield model


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn a refused prompt, layer, head or knob into wrong use, one line for each."""
    from treadle_server.errors import InvalidRequestError

    try:
        yield
    except InvalidRequestError as error:
        raise CommandFailedError([f"{v.field}: {v.message}" for v in error.violations], WRONG_USE) from error


def _knobs(model: LanguageModel, temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, float]:
    """Return the sampling knobs, those not given at values that show what each does."""
    few = model.vocab_size <= _FEW_TOKENS
    return {
        "temperature": 0.7 if temperature is None else temperature,
        "top_k": (3 if few else 40) if top_k is None else top_k,
        "top_p": 0.9 if top_p is None else top_p,
    }


def _model_walk(
    model: LanguageModel, prompt: str, layer: int, head: int | None, knobs: dict[str, float], seed: int
) -> Walk:
    from treadle_server.explain.model_walk import View
    from treadle_server.explain.walk import model_walk

    return model_walk(model, View(prompt=prompt, layer=layer, head=head, knobs=knobs, seed=seed))


def _show(walk: Walk) -> None:
    """Write a walk to stdout, in colour on a terminal that has it."""
    from rich.console import Console

    from treadle_server.explain.terminal import render

    write(render(walk, Console(file=sys.stdout)))


def _write_page(walk: Walk, path: Path) -> None:
    from treadle_server.explain.page import make_page

    try:
        path.write_text(make_page(walk), encoding="utf-8")
    except OSError as error:
        raise CommandFailedError([f"cannot write {path}: {error.strerror}"]) from error
    typer.echo(f"wrote {path}", err=True)
