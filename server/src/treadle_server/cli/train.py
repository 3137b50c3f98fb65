"""`treadle train`: trains a model on files in this process."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle_server.cli.failure import WRONG_USE, CommandFailedError, wrong_use
from treadle_server.cli.options import Json, NoPlugins, PluginDirs, given_fields
from treadle_server.cli.output import write_foreign, write_json
from treadle_server.cli.progress import spinner
from treadle_server.cli.train_display import show_remark, showing

if TYPE_CHECKING:
    from treadle_server.plugins import PluginManager
    from treadle_server.training.run import TrainingRun
    from treadle_server.training.run_events import RunResult

_DATA, _STEPS, _LORA, _KEEPING = "Data", "Steps", "LoRA", "Evaluation and checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """The settings of a run; those not given are left to the configuration file, then to the defaults."""

    field: Annotated[
        str | None, typer.Option(help="Field of JSONL and Parquet with the text (text).", rich_help_panel=_DATA)
    ] = None
    text_documents: Annotated[
        str | None, typer.Option(help="A text file's documents: file, paragraph or line (file).", rich_help_panel=_DATA)
    ] = None
    held_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="File or folder to evaluate on; repeatable.", rich_help_panel=_DATA),
    ] = None
    held_out_fraction: Annotated[
        float | None, typer.Option(help="Share of the documents to evaluate on instead (0).", rich_help_panel=_DATA)
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a row at most (512, or the model's context).", rich_help_panel=_DATA)
    ] = None
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch at most (1024).", rich_help_panel=_DATA)
    ] = None
    accumulate: Annotated[int | None, typer.Option(help="Batches of a step (1).", rich_help_panel=_DATA)] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the order (0).", rich_help_panel=_DATA)] = None

    steps: Annotated[int | None, typer.Option(help="Steps to train; instead of epochs.", rich_help_panel=_STEPS)] = None
    epochs: Annotated[int | None, typer.Option(help="Times that all data is read (1).", rich_help_panel=_STEPS)] = None
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, sgd, lion, or a plugin's (adamw).", rich_help_panel=_STEPS)
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate (0.0001).", rich_help_panel=_STEPS)] = None
    schedule: Annotated[
        str | None, typer.Option(help="constant, linear or cosine (cosine).", rich_help_panel=_STEPS)
    ] = None
    warmup_steps: Annotated[
        int | None, typer.Option(help="Steps in which the rate rises (0).", rich_help_panel=_STEPS)
    ] = None
    final_lr: Annotated[
        float | None, typer.Option(help="Rate at the end of the schedule (0).", rich_help_panel=_STEPS)
    ] = None
    betas: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Decays of the averages of adamw or lion.", rich_help_panel=_STEPS),
    ] = None
    eps: Annotated[float | None, typer.Option(help="Added to adamw's denominator.", rich_help_panel=_STEPS)] = None
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.", rich_help_panel=_STEPS)] = None
    weight_decay: Annotated[float | None, typer.Option(help="Decay of the weights (0.01).", rich_help_panel=_STEPS)] = (
        None
    )
    no_decay: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors without decay; repeatable.", rich_help_panel=_STEPS),
    ] = None
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that stay as they are; repeatable.", rich_help_panel=_STEPS),
    ] = None
    grad_clip_norm: Annotated[
        float | None, typer.Option(help="Norm that gradients are clipped to; 0: none (1).", rich_help_panel=_STEPS)
    ] = None
    label_smoothing: Annotated[
        float | None, typer.Option(help="Share of a target for all tokens (0).", rich_help_panel=_STEPS)
    ] = None
    z_loss: Annotated[
        float | None, typer.Option(help="Weight of log(Z)^2 in the loss (0).", rich_help_panel=_STEPS)
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="Arithmetic: float32 or float64 (float32).", rich_help_panel=_STEPS)
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(help="What computes: numpy, a plugin's, or auto for the fastest (auto).", rich_help_panel=_STEPS),
    ] = None
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Less memory for more time, same result.", rich_help_panel=_STEPS)
    ] = False

    lora_rank: Annotated[
        int | None, typer.Option(help="Train an adapter of this rank instead of the model.", rich_help_panel=_LORA)
    ] = None
    lora_alpha: Annotated[
        float | None, typer.Option(help="Its scale times the rank (twice the rank).", rich_help_panel=_LORA)
    ] = None
    lora_targets: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-target",
            metavar="NAME",
            help="Matrix with an adapter, such as q_proj; repeatable (all of attention and feed-forward).",
            rich_help_panel=_LORA,
        ),
    ] = None

    eval_interval: Annotated[
        int | None, typer.Option(help="Steps between evaluations (100).", rich_help_panel=_KEEPING)
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(help="Evaluations without a better loss that end it; 0: none do (0).", rich_help_panel=_KEEPING),
    ] = None
    checkpoint_interval: Annotated[
        int | None, typer.Option(help="Steps between checkpoints (500).", rich_help_panel=_KEEPING)
    ] = None
    keep_checkpoints: Annotated[
        int | None, typer.Option(help="Checkpoints kept, beside the best (2).", rich_help_panel=_KEEPING)
    ] = None
    save_dtype: Annotated[
        str | None,
        typer.Option(help="Number type of the files, such as bfloat16 (--dtype).", rich_help_panel=_KEEPING),
    ] = None
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files too.", rich_help_panel=_KEEPING)
    ] = False


def train(
    flags: TrainFlags,
    data: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DATA...", help="Files that end in .txt, .jsonl or .parquet, or folders of them."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name or folder of the model to begin with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="New folder for the better model.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of settings; options here override it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest checkpoint.")
    ] = False,
    plugin_dir: PluginDirs = None,
    no_plugin: NoPlugins = None,
    as_json: Json = False,
) -> None:
    """Train a model on text, JSONL or Parquet files, and write a model folder that `treadle generate -m` takes.

    Ctrl-C or SIGTERM ends it after the step under way with a checkpoint to resume from; a second one exits at once.
    """
    if out is None:
        raise wrong_use("--out FOLDER is needed: where the better model goes")
    with _refusals(), spinner("reading the model and the data"):
        plugins = _load_plugins(plugin_dir or [], no_plugin or [])
        run = _prepare(model, data or [], out, config, given_fields(flags), plugins, resume=resume)
    with showing() as report, _ended_by_signals(run) as received, _refusals():
        result = run.run(report)
    _show(result, as_json=as_json)
    if result.status == "interrupted":
        again = shlex.join(["treadle", "train", "--resume", "--out", str(out), *_plugin_options(plugin_dir, no_plugin)])
        show_remark(f"stopped after step {result.step}; go on with: {again}")
        raise CommandFailedError([], 128 + received[0])
    if not as_json:
        show_remark(f"try: {_try_out(run, out)}")


def _try_out(run: TrainingRun, out: Path) -> str:
    """Return the command line that generates with what was trained."""
    folder = shlex.quote(str(out))
    if run.config.lora() is None:
        return f"treadle generate PROMPT --model {folder}"
    return f"treadle generate PROMPT --model {shlex.quote(run.model)} --adapter {folder}"


def _plugin_options(folders: list[Path] | None, blocked: list[str] | None) -> list[str]:
    """Return the options that have the same plugins again."""
    given = [("--plugin-dir", str(folder)) for folder in folders or ()]
    given += [("--no-plugin", name) for name in blocked or ()]
    return [word for pair in given for word in pair]


def _load_plugins(folders: list[Path], blocked: list[str]) -> PluginManager:
    """Load the plugins, and say which are not active and why."""
    from treadle_server.plugins import PluginManager

    manager = PluginManager.load(folders, blocked=blocked)
    for plugin in manager.plugins:
        if plugin.is_faulty:
            show_remark(f"plugin {plugin.name} is not active: {plugin.reason}")
    return manager


def _prepare(
    model: str | None,
    data: list[Path],
    out: Path,
    config: Path | None,
    given: dict[str, Any],
    plugins: PluginManager,
    *,
    resume: bool,
) -> TrainingRun:
    from treadle_server.training.run import TrainingRun
    from treadle_server.training.train_config import read_settings, train_config

    settings = {**read_settings(config), **given}
    if resume:
        if model is not None or data:
            raise wrong_use("--resume goes on with the model and the data of the run: give neither")
        return TrainingRun.resume(out, settings, plugins=plugins)
    if model is None or not data:
        raise wrong_use("DATA and --model are needed, unless --resume goes on with a run")
    return TrainingRun.start(model, data, out, train_config(settings), plugins=plugins)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn wrong settings into wrong use, one line for each."""
    from treadle_server.errors import ConfigError, InvalidRequestError

    try:
        yield
    except InvalidRequestError as error:
        lines = [f"{violation.field}: {violation.message}" for violation in error.violations]
        raise CommandFailedError(lines, WRONG_USE) from error
    except ConfigError as error:
        raise CommandFailedError([str(error)], WRONG_USE) from error


@contextmanager
def _ended_by_signals(run: TrainingRun) -> Iterator[list[int]]:
    """Let SIGINT and SIGTERM end the run after its step, and a second one the process; lends what was received."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        run.stop()
        with suppress(OSError):  # unbuffered: the handler may have interrupted a write to the stream
            os.write(2, b"stopping after this step; another signal exits at once\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(result: RunResult, *, as_json: bool) -> None:
    if as_json:
        figures = dataclasses.asdict(result)
        infinite = {
            name: None for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)
        }
        write_json({**figures, **infinite, "folder": str(result.folder), "checkpoint": str(result.checkpoint)})
        return
    place = result.checkpoint if result.status == "interrupted" else result.folder
    held_out = ""
    if result.held_out_loss is not None:
        held_out = f", held-out loss {result.held_out_loss:.4f} (perplexity {result.perplexity:.2f})"
        held_out += f" at step {result.best_step}"
    write_foreign(f"{place}: {result.step} steps, {result.num_tokens} tokens, loss {result.loss:.4f}{held_out}\n")
