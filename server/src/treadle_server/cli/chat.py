"""`treadle chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle_server.cli.connection import adapter_keywords, connected
from treadle_server.cli.failure import CommandFailedError, reading_stdin, show_errors, violation_lines, wrong_use
from treadle_server.cli.options import Adapter, SamplingFlags, ServerFlags, Target
from treadle_server.cli.output import write, write_foreign
from treadle_server.cli.security import ConnectionFlags

if TYPE_CHECKING:
    from treadle_client import Client, InvalidArgumentError, Stream

_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."


def chat(
    sampling: SamplingFlags,
    server: ServerFlags,
    connection: ConnectionFlags,
    model: Annotated[
        str | None, typer.Argument(help="Name or folder of a model; with --target, a name on that server.")
    ] = None,
    adapter: Adapter = None,
    target: Target = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message that opens the chat.")] = None,
) -> None:
    """Hold a conversation through the model's chat template. Answers stream; /help lists what can be typed.

    Where neither an option here nor the model says how tokens are chosen, the preset chat does.
    """
    if target is None and model is None:
        raise wrong_use("MODEL is needed, unless --target names a running server")
    keywords = {**sampling.keywords(), **adapter_keywords(target, adapter)}
    with connected(target, model or "", server, connection, adapter) as client:
        served = client.get_model(model if target is not None else None)
        if not served.has_chat_template:
            raise CommandFailedError(
                [f"the model {served.name!r} has no chat template; use `treadle generate` to continue a text"]
            )
        if sampling.choose_nothing() and not served.default_knobs:
            keywords["preset"] = "chat"
        conversation = Conversation(client, system, {**keywords, "model": served.name}, served.context_length)
        _Terminal(conversation).run()


class Conversation:
    """The messages so far, and how the next answer is asked for."""

    def __init__(self, client: Client, system: str | None, keywords: dict[str, Any], context_length: int) -> None:
        self._client = client
        self._system = system
        self._keywords = keywords
        self.context_length = context_length
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, content: str) -> Stream:
        """Add a message of the user and ask for the answer."""
        self._messages.append({"role": "user", "content": content})
        return self._client.stream(self._messages, **self._keywords)

    def keep(self, answer: str) -> None:
        """Add the answer to the last message, whole or cut short; without one, forget the message too."""
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def is_full(self) -> bool:
        """Whether the messages leave no room for an answer."""
        from treadle_client import InvalidArgumentError

        try:
            return len(self._client.tokenize(self._messages)) >= self.context_length
        except InvalidArgumentError:  # it is the chat template that refuses them
            return False


class _Terminal:
    """Reads lines, and writes answers as they come.

    Over a pipe there are no prompts, an empty line ends each answer, and an error ends it all.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self._interactive:
            _enable_line_editing()
            self._note(_HELP)
        while (line := self._read_line()) is not None:
            command = line.strip()
            if command == "/quit":
                return
            if command == "/reset":
                self._conversation.reset()
                self._note("The conversation starts afresh.")
            elif command.startswith("/"):
                self._note(_HELP)
            elif command:
                self._answer(line)

    def _read_line(self) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        if not self._interactive:
            with reading_stdin():
                line = sys.stdin.buffer.readline().decode("utf-8")
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                with reading_stdin():
                    return input("> ")
            except EOFError:
                write("\n")
                return None
            except KeyboardInterrupt:
                write("\n")
                self._note(_HELP)

    def _answer(self, content: str) -> None:
        """Stream one answer; the conversation goes on after Ctrl-C and when the context is full."""
        from treadle_client import InvalidArgumentError, TreadleClientError

        stream = self._conversation.ask(content)
        try:
            self._write(stream)
        except InvalidArgumentError as error:
            self._refused(error)
        except TreadleClientError as error:
            if not self._interactive:
                raise
            show_errors([error.message])
        finally:
            stream.close()
            self._conversation.keep(stream.text)

    def _write(self, stream: Stream) -> None:
        try:
            for chunk in stream:
                write_foreign(chunk.text)
        except KeyboardInterrupt:
            self._note("\n[stopped]", end="")
        write("\n" if self._interactive else "\n\n")
        if any(finish.reason == "context_full" for finish in stream.finishes.values()):
            self._note_full()

    def _refused(self, error: InvalidArgumentError) -> None:
        """Explain a refusal: a full context is told and the chat goes on; over a pipe anything else ends it."""
        if self._conversation.is_full():
            self._note_full()
        elif self._interactive:
            show_errors(violation_lines(error))
        else:
            raise error

    def _note_full(self) -> None:
        length = self._conversation.context_length
        self._note(f"[The model's context of {length} tokens is full. /reset starts afresh.]")

    def _note(self, text: str, end: str = "\n") -> None:
        """Write a remark to stderr, apart from the answers."""
        typer.secho(text + end, dim=True, err=True, nl=False)


def _enable_line_editing() -> None:
    """Let `input` edit lines and recall earlier ones, where Python was built with readline."""
    try:
        import readline  # noqa: F401 - importing it is what enables it
    except ImportError:
        return
