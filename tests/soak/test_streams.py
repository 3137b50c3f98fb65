"""Many streams at once, a third of them cancelled: what finishes is right, and nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from treadle_client import Client

NUM_STREAMS = 64
NUM_KINDS = 24
PREFIX_CACHE_BYTES = 1 << 20
MEGABYTE = 1 << 20
# A health check that takes longer fails; this process asks while it reads 64 streams, so its own threads count.
HEALTH_S = 10.0


def kinds() -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts of mixed lengths with their knobs, the same every time."""
    source = random.Random(6)
    made = []
    for seed in range(NUM_KINDS):
        prompt = [source.randrange(3, 250) for _ in range(source.choice([1, 3, 10, 40, 90]))]
        knobs = {"max_tokens": source.choice([1, 4, 12, 30]), "n": source.choice([1, 1, 1, 2]), "seed": seed}
        made.append((prompt, {**knobs, "temperature": 0.9, "ignore_eos": True, "token_ids": True}))
    return made


def read(client: Client, kind: tuple[list[int], dict[str, Any]], num_chunks: int | None) -> list[tuple[int, ...]]:
    """Read a stream, or as many of its chunks and then cancel it; return the tokens of each choice."""
    prompt, knobs = kind
    tokens: list[list[int]] = [[] for _ in range(knobs["n"])]
    with client.stream(prompt, **knobs) as stream:
        for number, chunk in enumerate(stream):
            if num_chunks is not None and number >= num_chunks:
                break
            tokens[chunk.index] += chunk.token_ids
        if num_chunks is None:
            assert [stream.finishes[i].reason for i in range(knobs["n"])] == ["max_tokens"] * knobs["n"]
    return [tuple(part) for part in tokens]


@pytest.fixture(scope="module")
def server(spawn: Callable[..., Any], configured: Callable[..., Path], tiny_folder: Path) -> Iterator[Any]:
    """A server process with a small prefix cache, so that it is full early."""
    file = configured(numerics="reproducible", max_prefix_cache_bytes=PREFIX_CACHE_BYTES)
    with spawn("serve", f"tiny={tiny_folder}", "--port", "0", "--config", file) as running:
        yield running


class Crowd:
    """Streams that run at once until as many have ended, each checked against its kind's own answer."""

    def __init__(self, client: Client, expected: list[list[tuple[int, ...]]]) -> None:
        self.client = client
        self.expected = expected
        self.num_finished = 0
        self.num_cancelled = 0
        self._lock = threading.Lock()

    def run(self, count: int) -> None:
        """Run `count` streams, NUM_STREAMS at a time."""
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            for done in pool.map(self._one, range(count)):
                assert done is None

    def _one(self, number: int) -> None:
        source = random.Random(number)
        index = source.randrange(NUM_KINDS)
        cancelled = source.random() < 1 / 3
        kind = kinds()[index]
        got = read(self.client, kind, source.randrange(8) if cancelled else None)
        for part, whole in zip(got, self.expected[index], strict=True):
            assert part == (whole[: len(part)] if cancelled else whole)
        with self._lock:
            self.num_cancelled += cancelled
            self.num_finished += not cancelled


@contextmanager
def asking_health(address: str) -> Iterator[list[float]]:
    """Ask for health again and again meanwhile; lend the times that it took, in seconds."""
    times_s: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not over.wait(0.02):
                begun_s = time.monotonic()
                status = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S).status
                assert status == health_pb2.HealthCheckResponse.SERVING
                times_s.append(time.monotonic() - begun_s)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield times_s
        finally:
            over.set()
            asked.result()


@pytest.mark.counts(default=192, full=10_000)
def test_streams_leave_nothing_behind(
    server: Any, wait_until_idle: Callable[..., None], figure: Callable[[str], None], count: int
) -> None:
    """64 at a time, a third cancelled: right tokens; then no keys and values, and memory, threads and files as before.

    The first fifth warms the server up: buffers of its allocator, threads that are made on first use.
    """
    with Client(server.address, timeout_s=120) as client:
        crowd = Crowd(client, [read(client, kind, None) for kind in kinds()])
        crowd.run(count // 5)
        wait_until_idle(client)
        rss, threads, files = server.usage()
        begun_s = time.monotonic()
        with asking_health(server.address) as health_s:
            crowd.run(count - count // 5)
        seconds = time.monotonic() - begun_s
        wait_until_idle(client)
        rss_after, threads_after, files_after = server.usage()
        load = client.get_load()[0]
        for kind, expected in zip(kinds(), crowd.expected, strict=True):
            assert read(client, kind, None) == expected
    grown_mb = (rss_after - rss) / MEGABYTE
    figure(
        f"streams: {crowd.num_finished} finished and {crowd.num_cancelled} cancelled, {NUM_STREAMS} at a time, "
        f"{(count - count // 5) / seconds:.0f}/s; keys and values {load.kv_cache_bytes} bytes, prefix cache "
        f"{load.prefix_cache_bytes} of {load.max_prefix_cache_bytes} bytes; memory {rss / MEGABYTE:.1f} MB and "
        f"{grown_mb:+.1f} MB, threads {threads} and {threads_after - threads:+}, files {files} and "
        f"{files_after - files:+}; slowest of {len(health_s)} health checks {max(health_s):.2f} s"
    )
    assert crowd.num_cancelled + crowd.num_finished == count
    assert load.prefix_cache_bytes <= PREFIX_CACHE_BYTES
    assert (load.num_paused_sequences, load.num_preempted_sequences) == (0, 0)
    assert threads_after <= threads + 2
    assert files_after <= files + 2
    assert grown_mb < (16 if count >= 10_000 else 48)
    assert not server.faults()
