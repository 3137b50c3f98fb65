"""`treadle generate`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client

Run = Callable[..., Any]  # the fixtures `treadle` and `start`
SLOW = ("--stage", "slow", "--seed", "3", "--ignore-eos", "--max-tokens", "100")


def finished_text(target: str) -> str:
    """Return what the options SLOW generate when nothing stops them."""
    with Client(target) as client:
        return client.generate("the cat", seed=3, ignore_eos=True, max_tokens=100).text


def test_an_embedded_server_writes_what_a_running_one_does(treadle: Run, tiny_folder: Path, target: str) -> None:
    """The same text comes from the server inside the process and from the one at --target, and nothing else."""
    options = ("the cat", "--seed", "5", "--max-tokens", "20")
    own = treadle("generate", "-m", tiny_folder, *options)
    served = treadle("generate", "--target", target, *options)
    with Client(target) as client:
        text = client.generate("the cat", seed=5, max_tokens=20).text
    assert own.stdout == served.stdout == text.removesuffix("\n") + "\n"
    assert own.stderr == served.stderr == ""


def test_json_is_one_document(treadle: Run, target: str) -> None:
    """--json writes the prompt info and every choice with its ids, log-probabilities and finish."""
    options = ("--json", "--token-ids", "--logprobs", "raw", "--top-logprobs", "2", "--n", "2", "--max-tokens", "3")
    document = json.loads(treadle("generate", "the cat", "--target", target, "--temperature", "0.7", *options).stdout)
    assert document["prompt_info"]["model"] == "tiny"
    assert document["prompt_info"]["knobs"]["temperature"] == 0.7
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    for choice in document["choices"]:
        assert choice["finish"]["usage"]["num_generated_tokens"] == len(choice["token_ids"])
        assert [entry["token_id"] for entry in choice["logprobs"]] == choice["token_ids"]
        assert all(len(entry["top"]) == 2 for entry in choice["logprobs"])


def test_a_dash_reads_the_prompt_from_stdin(treadle: Run, target: str) -> None:
    """The prompt on stdin counts without its last line end."""
    options = ("--target", target, "--echo", "--temperature", "0", "--max-tokens", "4")
    piped = treadle("generate", "-", *options, stdin="the cat sat\n")
    assert piped.stdout == treadle("generate", "the cat sat", *options).stdout
    assert piped.stdout.startswith("the cat sat")


def test_several_texts_do_not_mix(treadle: Run, target: str) -> None:
    """With --n the texts come one after the other, each from a new line."""
    options = {"n": 3, "seed": 1, "max_tokens": 8}
    with Client(target) as client:
        texts = [choice.text for choice in client.generate("the", **options).choices]
    done = treadle("generate", "the", "--target", target, "--n", "3", "--seed", "1", "--max-tokens", "8")
    assert done.stdout == "".join(text.removesuffix("\n") + "\n" for text in texts)


def test_zero_is_a_value(treadle: Run, target: str) -> None:
    """A flag of 0 reaches the server as 0: temperature, top_k and seed."""
    options = ("--temperature", "0", "--top-k", "0", "--seed", "0", "--max-tokens", "1", "--json")
    info = json.loads(treadle("generate", "the", "--target", target, *options).stdout)["prompt_info"]
    assert (info["knobs"]["temperature"], info["knobs"]["top_k"], info["seed"]) == (0, 0, 0)
    assert [stage["name"] for stage in info["chain"]] == ["greedy"]


def test_stages_and_order_shape_the_chain(treadle: Run, target: str) -> None:
    """--stage adds stages with typed parameters, --order puts the chain in order."""
    options = ("--stage", "slow", "--stage", 'top_k:{"top_k": 5}', "--order", "top_k,slow,categorical", "--json")
    done = treadle("generate", "the", "--target", target, "--max-tokens", "1", *options)
    info = json.loads(done.stdout)["prompt_info"]
    assert [stage["name"] for stage in info["chain"]] == ["top_k", "slow", "categorical"]
    assert info["chain"][0]["parameters"] == {"top_k": 5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "nan", "--top-p", "0", "--top-k=-7"], ["temperature", "nan", "top_p", "-7"]),
        (["--max-tokens", "0", "--stop", "", "--n", "0", "--preset", "x"], ["max_tokens", "stop[0]", "n: ", "preset"]),
        (["--stage", "nope"], ["nope", "top_k"]),
        (["--stage", 'top_k:{"k": 5}'], ["stages[0].parameters.k"]),
        (["--temperature", "warm"], ["--temperature"]),
        (["--stage", "top_k:5"], ["--stage top_k", "JSON object"]),
        (["--stage", "top_k:{"], ["--stage top_k", "JSON"]),
        (["--stage", f'top_k:{{"top_k": {"[" * 5000}{"]" * 5000}}}'], ["--stage top_k", "nested too deeply"]),
        (["--stage", f'top_k:{{"top_k": {"[" * 500}{"]" * 500}}}'], ["stages[0]", "levels"]),
        (["--logprobs", "raw"], ["--json"]),
        (["--dtype", "float64"], ["--dtype", "--target"]),
    ],
)
def test_wrong_options_are_named(treadle: Run, target: str, options: list[str], words: list[str]) -> None:
    """A wrong value exits with 2, writes nothing to stdout, and says what was wrong."""
    done = treadle("generate", "the cat", "--target", target, *options, status=2)
    assert done.stdout == ""
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("127.0.0.1:74333", "the port must be 1 to 65535, got '74333'"),
        ("http://127.0.0.1:7433", "expected HOST:PORT, without http://"),
    ],
)
def test_a_target_that_is_none_is_refused(treadle: Run, target: str, message: str) -> None:
    """It exits with 2 before anything is sent."""
    assert message in treadle("generate", "the", "--target", target, status=2).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-m", "nope"], ["nope"]),
        (["-m", "storis"], ["did you mean 'stories'?"]),
        (["-m", "./nope"], ["there is no such folder: './nope'"]),
        (
            ["--target", "127.0.0.1:1"],
            ["no server answers at 127.0.0.1:1 (connection refused); start one with"],
        ),
        (["-m", "{tiny}", "--no-plugin", "nope"], ["nope", "samplers"]),
        (["--dtype", "int8"], ["dtype", "int8"]),
    ],
)
def test_what_cannot_be_had_is_named(treadle: Run, tiny_folder: Path, options: list[str], words: list[str]) -> None:
    """A missing model, server, plugin or number type exits with 1 and one line."""
    options = [option.format(tiny=tiny_folder) for option in options]
    (line,) = treadle("generate", "the cat", *options, status=1).stderr.splitlines()
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == []


def test_a_model_that_the_server_lacks_is_named(treadle: Run, target: str) -> None:
    """The error for an unknown model lists the served ones."""
    done = treadle("generate", "the", "--target", target, "--model", "nope", status=1)
    assert "'nope'" in done.stderr
    assert "tiny" in done.stderr


def test_text_streams_and_ctrl_c_keeps_it(start: Run, target: str) -> None:
    """Text arrives long before the end; Ctrl-C then exits with 130, keeps the text and frees the server."""
    with start("generate", "the cat", "--target", target, *SLOW) as process:
        assert process.stdout is not None
        first = process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors == b""
    kept = (first + rest).decode().removesuffix("\n")
    whole = finished_text(target)
    assert 0 < len(kept) < len(whole)
    assert whole.startswith(kept)
    assert_idle(target)


def assert_idle(target: str) -> None:
    """Check that the server stops working within a step or so."""
    give_up = time.monotonic() + 2
    with Client(target) as client:
        while any(load.num_running_sequences for load in client.get_load()):
            assert time.monotonic() < give_up
            time.sleep(0.02)


def test_ctrl_c_keeps_the_json_document(start: Run, target: str) -> None:
    """Interrupted, --json writes what came; the choice has no finish."""
    with start("generate", "the cat", "--target", target, "--json", *SLOW) as process, Client(target) as client:
        while not client.get_load()[0].num_running_sequences:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    (choice,) = json.loads(output)["choices"]
    assert choice["finish"] is None
    assert finished_text(target).startswith(choice["text"])


def test_a_reader_that_leaves_ends_the_command(start: Run, target: str) -> None:
    """When whoever reads stdout has gone, the command ends with 1 and no traceback, and the server is freed."""
    with start("generate", "the cat", "--target", target, *SLOW) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=10) == 1
        assert process.stderr.read() == b""
    assert_idle(target)
