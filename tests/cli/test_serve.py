"""`treadle serve`: its start, its failures to start, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client, Stream, TreadleClientError, UnavailableError

Run = Callable[..., Any]  # the fixtures `treadle`, `start` and `serve`


def slow_stream(client: Client) -> Stream:
    """Start a stream that takes two seconds, and wait for its first token."""
    stream = client.stream("the cat", stages=["slow"], ignore_eos=True, max_tokens=100, token_ids=True)
    next(stream)
    return stream


@pytest.fixture
def slow_model(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a file that is read only once somebody writes it: its loading waits until then."""
    folder = tmp_path / "slow-model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    return folder


def let_it_load(folder: Path) -> None:
    """Let the loading of `slow_model` go on."""
    file = folder / "generation_config.json"
    with file.open("w") as pipe:
        file.unlink()  # whoever opens it again finds no file, which is allowed
        pipe.write("{}")


def test_one_line_tells_the_address(start: Run, tiny_folder: Path) -> None:
    """The line on stdout names the models and the address that answers."""
    with start("serve", f"one={tiny_folder}", tiny_folder, "--port", "0") as process:
        line = process.stdout.readline().decode()
        models, address = line.removeprefix("treadle serves ").split(" at ")
        with Client(address.strip()) as client:
            client.wait_ready(timeout_s=5)
            served = [model.name for model in client.list_models()]
        process.terminate()
        assert process.stdout.read() == b""
        assert process.wait(timeout=10) == 0
    assert models == "one, llama_plain"
    assert served == ["llama_plain", "one"]


def test_it_answers_not_serving_while_it_loads(start: Run, slow_model: Path, free_port: int) -> None:
    """Health checks are answered from the start: not serving, then serving once the model is there."""
    with start("serve", slow_model, "--port", str(free_port)) as process, Client(f"127.0.0.1:{free_port}") as client:
        while b"loading" not in process.stderr.readline():
            pass
        with pytest.raises(TreadleClientError, match=r"no ready server"):
            client.wait_ready(timeout_s=0.3)
        with pytest.raises(UnavailableError, match="loading"):
            client.generate("the", max_tokens=1)
        let_it_load(slow_model)
        client.wait_ready(timeout_s=10)
        assert len(client.generate("the", max_tokens=1, token_ids=True).choices) == 1
        while b"the backend numpy computes in float32" not in process.stderr.readline():
            pass


def test_a_signal_while_it_loads_ends_it(start: Run, slow_model: Path) -> None:
    """SIGTERM does not wait for the model."""
    with start("serve", slow_model, "--port", "0") as process:
        while b"loading" not in process.stderr.readline():
            pass
        process.terminate()
        assert process.wait(timeout=5) == 0
        assert process.stdout.read() == b""


def test_the_first_signal_drains(serve: Run, tiny_folder: Path, plugin_dir: Path) -> None:
    """After SIGTERM a stream under way gets all its tokens, new requests are refused, and the status is 0."""
    with serve(tiny_folder, "--plugin-dir", plugin_dir) as (process, address), Client(address, retries=0) as client:
        stream = slow_stream(client)
        process.terminate()
        while b"draining" not in process.stderr.readline():
            pass
        with Client(address, retries=0) as late, pytest.raises(UnavailableError, match="shutting down"):
            late.generate("the", max_tokens=1)
        with pytest.raises(TreadleClientError):
            client.wait_ready(timeout_s=0.2)
        for _ in stream:
            pass
        assert stream.finishes[0].usage.num_generated_tokens == 100
        assert process.wait(timeout=10) == 0


def test_the_grace_period_ends(serve: Run, tiny_folder: Path, plugin_dir: Path) -> None:
    """What is not finished when the grace period is over is cancelled."""
    arguments = (tiny_folder, "--plugin-dir", plugin_dir, "--grace", "0.1")
    with serve(*arguments) as (process, address), Client(address) as client:
        stream = slow_stream(client)
        process.terminate()
        with pytest.raises(TreadleClientError):
            list(stream)
        assert process.wait(timeout=5) == 0


def test_the_second_signal_exits_at_once(serve: Run, tiny_folder: Path, plugin_dir: Path) -> None:
    """A second signal does not wait for the stream under way."""
    with serve(tiny_folder, "--plugin-dir", plugin_dir) as (process, address), Client(address) as client:
        stream = slow_stream(client)
        process.send_signal(signal.SIGINT)
        while b"draining" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=1) == 128 + signal.SIGINT
        with pytest.raises(TreadleClientError):
            list(stream)


def test_the_configuration_file_counts_and_options_override_it(serve: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Settings come from the file, and from the command line where both have them."""
    file = tmp_path / "treadle.toml"
    file.write_text("max_choices = 3\nmax_queued_requests = 5\nport = 1\n")
    with serve(tiny_folder, "--config", file, "--max-queued-requests", "7") as (_, address), Client(address) as client:
        limits = client.server_info().limits
    assert (limits.max_choices, limits.max_queued_requests) == (3, 7)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("colour = 1", ["colour"]),
        ("max_choices = 0", ["max_choices", "0"]),
        ("max_choices = x", ["treadle.toml", "line 1"]),
        (f"max_choices = {'[' * 5000}{']' * 5000}", ["treadle.toml", "nested too deeply"]),
    ],
)
def test_a_wrong_configuration_is_named(
    treadle: Run, tiny_folder: Path, tmp_path: Path, config: str, words: list[str]
) -> None:
    """A setting that is unknown, out of range or no TOML exits with 1 and one line that names it."""
    file = tmp_path / "treadle.toml"
    file.write_text(config)
    assert_fails(treadle, words, tiny_folder, "--config", file)


def assert_fails(treadle: Run, words: list[str], *arguments: str | Path) -> None:
    """Check that `treadle serve` exits with 1, and that its last line is an error with these words."""
    done = treadle("serve", *arguments, status=1)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert [word for word in words if word not in lines[-1]] == []


def test_a_taken_port_is_named(treadle: Run, tiny_folder: Path, target: str) -> None:
    """A second server on the same port says that the address is in use."""
    assert_fails(
        treadle, [target, "in use; choose another with --port"], tiny_folder, "--port", target.rpartition(":")[2]
    )


def test_models_that_cannot_be_served_are_named(treadle: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """An unknown model, a broken folder, and two models of one name are refused."""
    assert_fails(treadle, ["nope"], tiny_folder, "nope")
    assert_fails(treadle, ["llama_plain", "NAME="], tiny_folder, tiny_folder)
    shutil.copytree(tiny_folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not a safetensors file")
    assert_fails(treadle, ["model.safetensors"], tmp_path / "broken", "--port", "0")


def test_strict_plugins_refuses_a_broken_one(treadle: Run, serve: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A plugin that does not load is listed and left out; with --strict-plugins the server does not start."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')")
    with serve(tiny_folder, "--plugin-dir", tmp_path) as (_, address):
        listed = json.loads(treadle("plugins", "--target", address, "--json").stdout)
    assert {p["name"] for p in listed if p["status"] != "active"} == {"broken"}
    assert_fails(treadle, ["broken", "no luck"], tiny_folder, "--plugin-dir", tmp_path, "--strict-plugins")
