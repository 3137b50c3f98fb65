"""`treadle chat`, over a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

Run = Callable[..., Any]  # the fixtures `treadle` and `start`
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def answer(client: Client, *contents: str, system: str | None = None) -> str:
    """Return the greedy answer to messages of the user and the assistant in turns."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return client.generate(messages, temperature=0, max_tokens=6).text


def test_each_answer_knows_the_conversation(treadle: Run, target: str) -> None:
    """Every turn sends the whole conversation, system message first, until /reset; blank lines are nothing.

    An empty line ends each answer.
    """
    lines = "hi\n\nthe cat\n/reset\nhi\n/quit\nnever sent\n"
    done = treadle("chat", "tiny", "--target", target, "--system", "a", *GREEDY, stdin=lines)
    with Client(target) as client:
        first = answer(client, "hi", system="a")
        second = answer(client, "hi", first, "the cat", system="a")
    assert done.stdout == f"{first}\n\n{second}\n\n{first}\n\n"


def test_an_embedded_server_serves_the_chat(treadle: Run, tiny_folder: Path, target: str) -> None:
    """Without --target the model runs in this process and says the same; the end of the input ends the chat."""
    done = treadle("chat", tiny_folder, *GREEDY, stdin="hi")
    with Client(target) as client:
        assert done.stdout == answer(client, "hi") + "\n\n"


def test_a_full_context_offers_a_reset(treadle: Run, target: str) -> None:
    """A conversation that outgrows the context is told so and goes on after /reset."""
    lines = f"{'cat ' * 200}\nhi\n"
    done = treadle("chat", "--target", target, *GREEDY, stdin=lines)
    with Client(target) as client:
        assert done.stdout == answer(client, "hi") + "\n\n"
    assert "128 tokens is full" in done.stderr
    assert "/reset" in done.stderr


def test_an_answer_that_fills_the_context_says_so(treadle: Run, target: str) -> None:
    """The note comes after an answer that ended because the context was full, too."""
    done = treadle("chat", "--target", target, "--ignore-eos", "--seed", "1", stdin="hi\n")
    assert "128 tokens is full" in done.stderr


@pytest.mark.parametrize(
    ("options", "defaults", "knobs"),
    [
        ([], {}, {"preset": "chat"}),
        (["--seed", "4"], {}, {"preset": "chat"}),
        ([], {"temperature": 0.6}, {}),
        (["--top-p", "0.5"], {}, {"top_p": 0.5}),
        (["--preset", "code"], {}, {"preset": "code"}),
        (["--order", "top_k,categorical"], {}, {}),
    ],
)
def test_the_preset_chat_is_for_where_nothing_is_said(
    treadle: Run, tiny_folder: Path, tmp_path: Path, options: list[str], defaults: Any, knobs: Any
) -> None:
    """Without a sampling flag and without the model's own settings, answers are drawn as the preset chat says."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_folder, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | defaults))
    done = treadle("chat", folder, "--seed", "1", "--max-tokens", "8", *options, stdin="hi")
    keywords = {"seed": 4 if "--seed" in options else 1, "max_tokens": 8, **knobs}
    if "--order" in options:
        keywords["order"] = ["top_k", "categorical"]
    with embedded_server([str(folder)], ServerConfig(port=0)) as address, Client(address) as client:
        text = client.generate([{"role": "user", "content": "hi"}], **keywords).text
    assert done.stdout == text + "\n\n"


def test_wrong_use_is_named(treadle: Run, tiny_folder: Path, target: str, tmp_path: Path) -> None:
    """No model, a wrong flag and a model without a template end it before or at the first answer."""
    assert "MODEL" in treadle("chat", status=2).stderr
    done = treadle("chat", "--target", target, "--temperature=-1", stdin="hi\n", status=2)
    assert "temperature" in done.stderr
    folder = tmp_path / "plain"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no chat template" in treadle("chat", folder, status=1).stderr


@pytest.fixture
def terminal(target: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A chat with slow answers in a terminal: the process, and the end of the terminal that a person holds."""
    person, process_end = pty.openpty()
    command = [sys.executable, "-m", "treadle_server.cli", "chat", "--target", target, "--ignore-eos", "--seed", "4"]
    with subprocess.Popen(
        [*command, "--stage", "slow"], stdin=process_end, stdout=process_end, stderr=process_end
    ) as process:
        os.close(process_end)
        yield process, person
        process.kill()
    os.close(person)


def read_until_prompt(person: int) -> bytes:
    """Read what the terminal shows up to the next prompt."""
    shown = b""
    while not shown.endswith(b"\n> ") and not shown.endswith(b"m> "):
        shown += os.read(person, 1024)
    return shown


def test_ctrl_c_stops_the_answer_alone(terminal: tuple[subprocess.Popen[bytes], int], target: str) -> None:
    """In a terminal Ctrl-C ends an answer and frees the server; the chat goes on until Ctrl-D."""
    process, person = terminal
    assert b"/reset" in read_until_prompt(person)
    os.write(person, b"hi\n")
    with Client(target) as client:
        while not any(load.num_running_sequences for load in client.get_load()):
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert b"[stopped]" in read_until_prompt(person)
        time.sleep(0.1)
        assert not any(load.num_running_sequences for load in client.get_load())
    process.send_signal(signal.SIGINT)  # at the prompt it only shows the help
    assert b"/quit" in read_until_prompt(person)
    os.write(person, b"\x04")
    assert process.wait(timeout=10) == 0
