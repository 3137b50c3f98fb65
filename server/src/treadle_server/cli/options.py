"""Options that several commands share, each declared once."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle_server.cli.failure import wrong_use

_SAMPLING = "Sampling"
_STOPPING = "Stopping"
_SERVER = "Server in this process"

# Written out, as the table of presets is in a package that imports NumPy; a test compares them.
PRESET_NAMES = "code, maths, mail, qa, chat, creative, brainstorming, role_play"
DEFAULT_MODEL = "stories"  # bundled, so that the first command needs no download

Target = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Use a running server; without it, one runs in this process.")
]
ServedTarget = Annotated[
    str | None,
    typer.Option("--target", metavar="HOST:PORT", help="List what a running server has; without it, what is here."),
]
Adapter = Annotated[
    str | None,
    typer.Option(metavar="DIR|NAME", help="Folder of a LoRA adapter; with --target, the name of a loaded one."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, for scripts.")]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Folder of single-file plugins; repeatable.", rich_help_panel=_SERVER),
]
NoPlugins = Annotated[
    list[str] | None,
    typer.Option("--no-plugin", metavar="NAME", help="Plugin to leave out; repeatable.", rich_help_panel=_SERVER),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and when to stop. Values go to the server as they are; it checks them."""

    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; 0 takes the most likely token.", rich_help_panel=_SAMPLING)
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=_SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the smallest set of tokens with this probability.", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the noise.", rich_help_panel=_SAMPLING)] = None
    preset: Annotated[
        str | None, typer.Option(help=f"Named sampling settings: {PRESET_NAMES}.", rich_help_panel=_SAMPLING)
    ] = None
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:JSON]",
            help='Add a sampler stage, such as top_k:{"top_k":5}; repeatable.',
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    order: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME...", help="All stages of the chain, in the order to run them.", rich_help_panel=_SAMPLING
        ),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most; the room left if unset.", rich_help_panel=_STOPPING)
    ] = None
    min_tokens: Annotated[
        int | None, typer.Option(help="Tokens before which nothing ends the text.", rich_help_panel=_STOPPING)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends it; repeatable.", rich_help_panel=_STOPPING)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past end-of-sequence tokens.", rich_help_panel=_STOPPING)
    ] = False

    def keywords(self) -> dict[str, Any]:
        """Return what was given, as keywords of the client."""
        given = given_fields(self)
        if "stage" in given:
            given["stages"] = [_parse_stage(text) for text in given.pop("stage")]
        if "order" in given:
            given["order"] = [name.strip() for name in given["order"].split(",")]
        return given

    def choose_nothing(self) -> bool:
        """Whether how tokens are drawn is left open: no knob, preset, stage or order is given, whatever else is."""
        return given_fields(self).keys() <= {"seed", "max_tokens", "min_tokens", "stop", "ignore_eos"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Settings of a server that runs in this process; those not given are left to the configuration."""

    backend: Annotated[
        str | None,
        typer.Option(
            help="Compute backend: numpy, a plugin's, or auto for the fastest installed.", rich_help_panel=_SERVER
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="Number type of the arithmetic: float32 or float64.", rich_help_panel=_SERVER),
    ] = None
    numerics: Annotated[
        str | None,
        typer.Option(
            help="fast, or reproducible: no result depends on what else is in the batch.", rich_help_panel=_SERVER
        ),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="int8|int4",
            help="Round the model's large matrices to so many bits when it is loaded; for backends that can.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bf16",
            help="Round activations where they meet bfloat16, and keys and values: faster; for backends that can.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    plugin_dir: PluginDirs = None
    no_plugin: NoPlugins = None
    strict_plugins: Annotated[
        bool,
        typer.Option("--strict-plugins", help="Refuse to start when a plugin fails to load.", rich_help_panel=_SERVER),
    ] = False

    def settings(self) -> dict[str, Any]:
        """Return what was given, as settings of ServerConfig."""
        return {
            "backend": self.backend,
            "dtype": self.dtype,
            "numerics": self.numerics,
            "quantize": self.quantize,
            "activations": self.activations,
            "plugin_dirs": self.plugin_dir or None,
            "no_plugins": self.no_plugin or None,
            "strict_plugins": self.strict_plugins or None,
        }

    def refuse_beside_target(self) -> None:
        """Refuse every given setting: a server that runs already has its own."""
        for name in given_fields(self):
            option = f"--{name.replace('_', '-')}"
            raise wrong_use(f"{option} sets up a server in this process and cannot go with --target")


def given_fields(flags: Any) -> dict[str, Any]:
    """Return the options of a dataclass that were given; 0 is a value like any other."""
    values = ((f.name, getattr(flags, f.name)) for f in fields(flags))
    return {name: value for name, value in values if value is not None and value is not False and value != []}


def _parse_stage(text: str) -> tuple[str, dict[str, Any]]:
    """Split NAME or NAME:{json} into the stage's name and its parameters."""
    name, _, parameters = text.partition(":")
    if not parameters:
        return name, {}
    try:
        value = json.loads(parameters)
    except ValueError as error:
        raise wrong_use(f"--stage {name}: the parameters are no JSON ({error}), got {parameters}") from error
    except RecursionError as error:
        raise wrong_use(f"--stage {name}: the parameters are nested too deeply") from error
    if not isinstance(value, dict):
        raise wrong_use(f"--stage {name}: the parameters must be a JSON object, got {parameters}")
    return name, value
