"""The trainer that `treadle serve --with-trainer` starts beside the server, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle_server.cli.failure import CommandFailedError, wrong_use
from treadle_server.cli.security import TOKEN_VARIABLE

if TYPE_CHECKING:
    from treadle_server.config import ServerConfig
    from treadle_server.service.startup import ModelSource

_LOG = logging.getLogger(__name__)
_TRAINER = "Trainer beside the server"
_LAST_WORDS_S = 5.0  # what the trainer gets over its grace period before it is killed
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}  # noqa: S104 - where to reach what listens there

Report = Callable[[bool], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithTrainerFlags:
    """Whether a trainer runs beside the server, and how."""

    with_trainer: Annotated[
        bool,
        typer.Option(
            "--with-trainer", help="Start a trainer of the model that publishes here.", rich_help_panel=_TRAINER
        ),
    ] = False
    trainer_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Its port (7434); 0 takes a free one.", rich_help_panel=_TRAINER),
    ] = None
    trainer_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="Option of `treadle trainer`, such as --trainer-option=--lora-rank=8; repeatable.",
            rich_help_panel=_TRAINER,
        ),
    ] = None

    def check(self, config: ServerConfig, folder: Path | None) -> None:
        """Refuse what does not go together; `folder` is that of the only model, None where there are more."""
        if not self.with_trainer:
            if self.trainer_port is not None or self.trainer_option:
                raise wrong_use("--trainer-port and --trainer-option are about the trainer of --with-trainer")
        elif folder is None:
            raise wrong_use("--with-trainer trains the only model of a server; start `treadle trainer` for one of many")
        elif config.tls_certificate is not None:
            raise wrong_use(
                "--with-trainer needs a server in plain text; beside one with TLS, run: "
                f"{_line_beside_tls(config, folder)}"
            )
        elif config.token_file is not None and not self._has_token():
            raise wrong_use(
                f"--with-trainer publishes to a server that asks for tokens: put an administrator's token of "
                f"{config.token_file} into {TOKEN_VARIABLE}, or its file into --trainer-option=--server-token-file=FILE"
            )

    def _has_token(self) -> bool:
        given = any(option.startswith("--server-token-file") for option in self.trainer_option or ())
        return given or bool(os.environ.get(TOKEN_VARIABLE))


def _line_beside_tls(config: ServerConfig, folder: Path) -> str:
    """Return the command line of a trainer that publishes to a server with TLS; words in capitals are left open."""
    from treadle_server.service.address import join_address

    address = join_address(_EVERYWHERE.get(config.host, config.host), config.port)
    words = ["treadle", "trainer", str(folder), "--server", address, "--server-tls-ca", "FILE"]
    if config.tls_client_ca is not None:
        words += ["--server-tls-cert", "FILE", "--server-tls-key", "FILE"]
    if config.token_file is not None:
        words += ["--server-token-file", "FILE"]
    root = str(config.model_roots[0] / "published") if config.model_roots else "DIR"
    note = "" if config.model_roots else " (DIR under a --model-root of the server)"
    return f"{shlex.join([*words, '--publish-root', root])}{note}"


@asynccontextmanager
async def publish_root(roots: Sequence[Path], name: str) -> AsyncIterator[Path]:
    """Lend a folder that a server's model roots allow: under the first, or one that is removed afterwards."""
    if roots:
        yield roots[0].absolute() / f"published-{name}"
        return
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="treadle-published-")
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def trainer_arguments(
    flags: WithTrainerFlags, config: ServerConfig, source: ModelSource, root: Path, port: int
) -> list[str]:
    """Return the command line of the trainer of a server that listens on `port`."""
    from treadle_server.service.address import join_address

    address = join_address(_EVERYWHERE.get(config.host, config.host), port)
    arguments = [str(source.folder), "--json", "--exit-with-stdin", "--host", config.host]
    arguments += ["--server", address, "--served-model", source.name, "--publish-root", str(root)]
    arguments += [] if flags.trainer_port is None else ["--port", str(flags.trainer_port)]
    arguments += [] if config.token_file is None else ["--token-file", str(config.token_file)]
    arguments += ["--insecure"] if config.insecure else []
    for folder in config.plugin_dirs:
        arguments += ["--plugin-dir", str(folder)]
    for name in config.no_plugins:
        arguments += ["--no-plugin", name]
    return arguments + list(flags.trainer_option or ())


class TrainerProcess:
    """A trainer that runs; its address is where it takes calls."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, report: Report) -> None:
        self.address = address
        self._process = process
        self._report = report
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        await self._report(True)
        status = await self._process.wait()
        level = logging.ERROR if status else logging.INFO
        _LOG.log(level, "the trainer ended with status %d; the server serves on without it", status)
        await self._report(False)

    def terminate(self) -> None:
        """Ask it to end, if it has not; it finishes the call that it is at."""
        self._watching.cancel()
        if self._process.returncode is None:
            self._process.terminate()


@asynccontextmanager
async def running_trainer(arguments: Sequence[str], grace_s: float, report: Report) -> AsyncIterator[TrainerProcess]:
    """Start a trainer, lend it once it takes calls, and end it afterwards.

    `report` is told when it runs and when it does no more. One that dies meanwhile is logged and hurts nobody.

    Raises:
        CommandFailedError: it did not start; its own error is on stderr.
    """
    # What it reads from never ends while this process lives: it goes when this one is killed, too.
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "treadle_server.cli", "trainer", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        line = await process.stdout.readline() if process.stdout else b""
        if not line:
            raise CommandFailedError(["the trainer did not start; the lines above say why"])
        trainer = TrainerProcess(process, str(json.loads(line)["address"]), report)
        try:
            yield trainer
        finally:
            trainer.terminate()
    finally:
        await _end(process, grace_s)


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Let the process end by itself, and kill it when it does not."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace_s + _LAST_WORDS_S)
    except TimeoutError:
        process.kill()
        await process.wait()
