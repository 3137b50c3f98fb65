"""SIGKILL at random moments, of the server, of a client and of whatever installs a model.

The trainer has test_kill_trainer.py.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client, TreadleClientError
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.store import MANIFEST_FILE, ModelStore

NUM_STREAMS = 12
KNOBS = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True, "token_ids": True}


def prompt(seed: int) -> list[int]:
    """Return a prompt of its own for each seed."""
    return [3 + seed, 90, 41, 7 * seed % 200 + 3]


def whole(client: Client, seed: int) -> tuple[tuple[int, ...], str]:
    """Return the tokens and the text of a seed, from beginning to end."""
    choice = client.generate(prompt(seed), seed=seed, **KNOBS).choices[0]
    return choice.token_ids, choice.text


def until_cut(client: Client, seed: int) -> tuple[tuple[int, ...], str, bool]:
    """Read a stream for as long as it lasts; return its tokens, its text and whether it came to its end."""
    tokens: list[int] = []
    stream = client.stream(prompt(seed), seed=seed, **KNOBS)
    try:
        for chunk in stream:
            tokens += chunk.token_ids
    except TreadleClientError:
        return tuple(tokens), stream.text, False
    return tuple(tokens), stream.text, True


@pytest.mark.counts(default=1, full=60)
def test_a_killed_server_has_said_nothing_wrong(
    spawn: Callable[..., Any],
    configured: Callable[..., Path],
    tiny_folder: Path,
    figure: Callable[[str], None],
    count: int,
) -> None:
    """What was streamed is the beginning of what the next server says to the same seed, and whole streams are equal."""
    config = configured(numerics="reproducible")
    got: list[list[tuple[tuple[int, ...], str, bool]]] = []
    for number in range(count):
        source = random.Random(number)
        with (
            spawn("serve", f"tiny={tiny_folder}", "--port", "0", "--config", config) as server,
            Client(server.address, retries=0, timeout_s=60) as client,
            ThreadPoolExecutor(NUM_STREAMS) as pool,
        ):
            streams = [pool.submit(until_cut, client, seed) for seed in range(NUM_STREAMS)]
            time.sleep(source.uniform(0.0, 0.6))
            server.kill()
            got.append([stream.result() for stream in streams])
    with (
        spawn("serve", f"tiny={tiny_folder}", "--port", "0", "--config", config) as server,
        Client(server.address, timeout_s=60) as client,
    ):
        expected = [whole(client, seed) for seed in range(NUM_STREAMS)]
    for streams in got:
        for (tokens, text, ended), (all_tokens, all_text) in zip(streams, expected, strict=True):
            assert tokens == all_tokens[: len(tokens)]
            assert all_text.startswith(text)
            assert not ended or (tokens, text) == (all_tokens, all_text)
    cut = [tokens for streams in got for tokens, _, ended in streams if not ended]
    with_tokens = sum(map(bool, cut))
    figure(
        f"server killed {count} times: {count * NUM_STREAMS} streams, {len(cut)} cut, {with_tokens} of them with tokens"
    )


STREAMING = """
import sys
from concurrent.futures import ThreadPoolExecutor
from treadle_client import Client

def for_ever(seed):
    while True:
        for chunk in client.stream([3 + seed, 90], seed=seed, n=2, max_tokens=100, ignore_eos=True):
            if seed == 0:
                print(flush=True)

with Client(sys.argv[1]) as client, ThreadPoolExecutor(12) as pool:
    list(pool.map(for_ever, range(12)))
"""


@pytest.mark.counts(default=2, full=100)
def test_a_killed_client_leaves_nothing(
    spawn: Callable[..., Any],
    configured: Callable[..., Path],
    wait_until_idle: Callable[..., None],
    tiny_folder: Path,
    figure: Callable[[str], None],
    count: int,
) -> None:
    """Its streams end and their memory is free, and others get the same tokens as before."""
    config = configured(numerics="reproducible")
    slowest_s = 0.0
    with (
        spawn("serve", f"tiny={tiny_folder}", "--port", "0", "--config", config) as server,
        Client(server.address, timeout_s=60) as client,
    ):
        expected = whole(client, 1)
        for number in range(count):
            command = [sys.executable, "-c", STREAMING, server.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(random.Random(number).uniform(0.0, 0.3))
                process.kill()
            begun_s = time.monotonic()
            wait_until_idle(client)
            slowest_s = max(slowest_s, time.monotonic() - begun_s)
            assert whole(client, 1) == expected
        assert not server.faults()
    figure(f"client killed {count} times: all memory of 12 streams free after {slowest_s:.2f} s at most")


PULLING = """
import sys
from pathlib import Path
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.store import ModelStore

store = ModelStore(Path(sys.argv[2]))
for number in range(1_000_000):
    pull(sys.argv[1], store, name=f"model-{number % 3}")
    print(flush=True)
"""


@pytest.mark.counts(default=2, full=100)
def test_a_killed_install_leaves_whole_models(
    tiny_folder: Path, tmp_path: Path, figure: Callable[[str], None], count: int
) -> None:
    """Every model of the store has all its files as its manifest has them, and the next install cleans up."""
    store = ModelStore(tmp_path / "home")
    num_models = 0
    for number in range(count):
        command = [sys.executable, "-c", PULLING, str(tiny_folder), str(store.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.Random(number).uniform(0.0, 0.2))
            process.kill()
        for model in store.list():
            num_models += 1
            found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.folder.iterdir()}
            found.pop(MANIFEST_FILE)
            assert found == model.manifest.sha256
    pull(str(tiny_folder), store, name="last")
    # The empty file of a lock may stay: whoever removed it could take it from an install that is about to lock it.
    assert not [path for path in (store.root / "incoming").iterdir() if path.is_dir()]
    figure(f"install killed {count} times: {num_models} models looked at, all whole")
