"""Measures how long health checks take while a server computes and every core is busy with other work besides.

    python tests/benchmarks/bench_health.py [MODEL] [--seconds 60] [--streams 8]

A server process of its own (`treadle serve`) gets streams with long prompts, one burner process a core computes, and a
process asks `grpc.health.v1` ten times a second on a connection that stays open. For comparison it also measures how
late its own timer wakes it: that is the machine's doing, and not the server's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table
from treadle_client import Client, TreadleClientError

INTERVAL_S = 0.1
PROMPT = "The cat chases the mouse around the house, and the mouse knows every hole in the wall. " * 8


@contextmanager
def served(model: str, arguments: list[str]) -> Iterator[str]:
    """Run a server process and lend its address."""
    options = ["--port", "0", "--json", "--grace", "0", *arguments]
    command = [sys.executable, "-m", "treadle_server.cli", "serve", model, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def burn() -> None:
    """Keep one core busy."""
    numbers = np.random.default_rng(0).random((256, 256))
    while True:
        numbers @= numbers
        numbers /= np.abs(numbers).max()


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Keep cores busy."""
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


@contextmanager
def load(target: str, num_streams: int) -> Iterator[list[int]]:
    """Keep streams open that read long prompts and write; lend the number of tokens of each so far."""
    stop, counts = threading.Event(), [0] * num_streams

    def work(index: int) -> None:
        with Client(target) as client:
            while not stop.is_set():
                try:
                    with client.stream(PROMPT + str(index), max_tokens=64, ignore_eos=True, token_ids=True) as stream:
                        for chunk in stream:
                            counts[index] += len(chunk.token_ids)
                            if stop.is_set():
                                return
                except TreadleClientError:
                    stop.wait(0.1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask(target: str, seconds: float, results: multiprocessing.SimpleQueue[tuple[list[float], list[float]]]) -> None:
    """Ask health every tenth of a second, in a process of its own, and put the times and the timer's lateness."""
    answers, lateness = [], []
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest())
        next_s = time.perf_counter()
        end_s = next_s + seconds
        while next_s < end_s:
            time.sleep(max(0.0, next_s - time.perf_counter()))
            begun_s = time.perf_counter()
            lateness.append(begun_s - next_s)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            answers.append(time.perf_counter() - begun_s)
            next_s = max(next_s + INTERVAL_S, time.perf_counter())
    results.put((answers, lateness))


def measure(target: str, seconds: float) -> tuple[list[float], list[float]]:
    """Run `ask` where no thread of this process holds it up."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[tuple[list[float], list[float]]] = context.SimpleQueue()
    process = context.Process(target=ask, args=(target, seconds, results))
    process.start()
    found = results.get()
    process.join()
    return found


def row(name: str, times_s: list[float]) -> list[str]:
    """Return a row of the table, in milliseconds."""
    p50, p99, slowest = np.quantile(times_s, [0.5, 0.99, 1.0]) * 1e3
    return [name, str(len(times_s)), f"{p50:.1f}", f"{p99:.1f}", f"{slowest:.1f}"]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 1)
    args, rest = parser.parse_known_args()
    table = Table("what", "times", "p50 ms", "p99 ms", "slowest ms")
    with served(args.model, rest) as target:
        quiet, _ = measure(target, args.seconds / 3)
        table.add_row(*row("health, nothing else runs", quiet))
        with load(target, args.streams) as counts:
            computing, _ = measure(target, args.seconds)
            table.add_row(*row(f"health, {args.streams} streams", computing))
            with burners(args.burners):
                time.sleep(1.0)
                before, begun_s = sum(counts), time.perf_counter()
                busy, lateness = measure(target, args.seconds)
                rate = (sum(counts) - before) / (time.perf_counter() - begun_s)
            table.add_row(*row(f"health, {args.streams} streams, {args.burners} burners", busy))
            table.add_row(*row("a timer of the asking process, the same time", lateness))
    Console(width=110).print(table)
    print(f"{rate:.1f} tokens/s meanwhile")


if __name__ == "__main__":
    main()
