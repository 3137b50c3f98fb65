"""`treadle generate`: streams a continuation of a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle_server.cli.connection import adapter_keywords, connected
from treadle_server.cli.failure import INTERRUPTED, CommandFailedError, reading_stdin, wrong_use
from treadle_server.cli.options import DEFAULT_MODEL, Adapter, Json, SamplingFlags, ServerFlags, Target, given_fields
from treadle_server.cli.output import write, write_foreign, write_json
from treadle_server.cli.security import ConnectionFlags

if TYPE_CHECKING:
    from treadle_client import Chunk, Finish, PromptInfo, Stream, TokenLogprob

_RESPONSE = "Response"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFlags:
    """What the answer holds."""

    n: Annotated[int | None, typer.Option("--n", help="Number of texts to generate.", rich_help_panel=_RESPONSE)] = None
    echo: Annotated[
        bool, typer.Option("--echo", help="Write the prompt before the text.", rich_help_panel=_RESPONSE)
    ] = False
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Keep the stop text that matched.", rich_help_panel=_RESPONSE)
    ] = False
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Show special tokens.", rich_help_panel=_RESPONSE)
    ] = False
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Token ids; with --json.", rich_help_panel=_RESPONSE)
    ] = False
    logprobs: Annotated[
        str | None,
        typer.Option(
            metavar="raw|processed",
            help="Log-probabilities of the model, or of the distribution drawn from; with --json.",
            rich_help_panel=_RESPONSE,
        ),
    ] = None
    top_logprobs: Annotated[
        int | None, typer.Option(help="Most likely tokens to list; with --json.", rich_help_panel=_RESPONSE)
    ] = None
    prompt_logprobs: Annotated[
        bool,
        typer.Option("--prompt-logprobs", help="Prompt log-probabilities; with --json.", rich_help_panel=_RESPONSE),
    ] = False

    def keywords(self, *, as_json: bool) -> dict[str, Any]:
        """Return what was given, as keywords of the client; what only JSON can show is refused without it."""
        given = given_fields(self)
        for name in ("token_ids", "logprobs", "top_logprobs", "prompt_logprobs"):
            if name in given and not as_json:
                raise wrong_use(f"--{name.replace('_', '-')} needs --json to be shown")
        return given


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    sampling: SamplingFlags,
    response: ResponseFlags,
    server: ServerFlags,
    connection: ConnectionFlags,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help=f"Name or folder of a model ({DEFAULT_MODEL}); with --target, a name on that server."
        ),
    ] = None,
    adapter: Adapter = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt. The text streams to stdout; Ctrl-C stops it and keeps what came."""
    keywords = {**sampling.keywords(), **response.keywords(as_json=as_json), **adapter_keywords(target, adapter)}
    if target is not None and model is not None:
        keywords["model"] = model
    text = _read_prompt() if prompt == "-" else prompt
    with (
        connected(target, model or DEFAULT_MODEL, server, connection, adapter) as client,
        client.stream(text, **keywords) as stream,
    ):
        _write(stream, as_json=as_json)


def _read_prompt() -> str:
    """Return what stdin holds, without the line end that shells and editors put last."""
    with reading_stdin():
        text = sys.stdin.buffer.read().decode("utf-8")
    return text.removesuffix("\n").removesuffix("\r")


def _write(stream: Stream, *, as_json: bool) -> None:
    """Write a stream; on Ctrl-C what came is kept and the exit status says so."""
    record = Record()
    writer = _TextWriter()
    try:
        for chunk in stream:
            record.add(chunk)
            if not as_json:
                writer.add(chunk)
    except KeyboardInterrupt:
        raise CommandFailedError([], INTERRUPTED) from None
    finally:
        if as_json and stream.prompt_info is not None:
            write_json(record.document(stream.prompt_info))
        elif not as_json:
            writer.close()


class _TextWriter:
    """Writes the first unfinished choice as it comes and holds the others back, so that texts do not mix."""

    def __init__(self) -> None:
        self._held: dict[int, str] = {}
        self._finished: set[int] = set()
        self._current = 0
        self._at_line_start = True

    def add(self, chunk: Chunk) -> None:
        """Take one chunk and write what can be written."""
        if chunk.finish is not None:
            self._finished.add(chunk.index)
        self._held[chunk.index] = self._held.get(chunk.index, "") + chunk.text
        self._write_held()
        while self._current in self._finished:
            self._end_line()
            self._current += 1
            self._write_held()

    def close(self) -> None:
        """Write what is held back still, each choice from a new line."""
        self._end_line()
        for index in sorted(self._held):
            self._current = index
            self._write_held()
            self._end_line()

    def _write_held(self) -> None:
        text = self._held.pop(self._current, "")
        if text:
            write_foreign(text)
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            write("\n")
            self._at_line_start = True


class _ChoiceRecord:
    """What one choice has brought so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None


class Record:
    """What a stream has brought, for one JSON document."""

    def __init__(self) -> None:
        self._choices: dict[int, _ChoiceRecord] = {}

    def add(self, chunk: Chunk) -> None:
        """Take one chunk."""
        choice = self._choices.setdefault(chunk.index, _ChoiceRecord())
        choice.texts.append(chunk.text)
        choice.token_ids += chunk.token_ids
        choice.logprobs += chunk.logprobs
        choice.finish = chunk.finish or choice.finish

    def document(self, info: PromptInfo) -> dict[str, Any]:
        """Return the document; a choice that was cut short has no finish."""
        return {"prompt_info": info, "choices": list(self._documents())}

    def _documents(self) -> Iterable[dict[str, Any]]:
        for index, choice in sorted(self._choices.items()):
            yield {
                "index": index,
                "text": "".join(choice.texts),
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs,
                "finish": choice.finish,
            }
