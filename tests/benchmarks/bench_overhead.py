"""Measures what a token costs outside the model: engine, sampling, events, text, messages, gRPC.

    python tests/benchmarks/bench_overhead.py [MODEL] [--streams 1 32] [--forward-ms 10] [--chains default greedy]
        [--numpy-draw]

A server process of its own serves MODEL's configuration and tokenizer on loopback, with a stand-in for the arithmetic:
its forward pass reads memory for about `--forward-ms` without Python's lock, as a model does; its head copies rows of
logits that were made before. Tokens are drawn by compiled code, as they are beside compiled arithmetic, or with
`--numpy-draw` as beside NumPy's. A client process reads streams of equal length, all at once: the synchronous client
one, the asynchronous client several. Counted is the stretch in which all of them decode, in microseconds a token (a
step of 32 streams makes 32 of them):

- `step`: wall time of the server less the model's: forward pass, head, memory of keys and values. While the model
  computes, the event loop sends what the last step made: that is in it only as far as it holds the engine up. With
  `--forward-ms 0` all of it is, and more, as both want Python's lock all the time.
- `server`: CPU time of all threads of the server less the model's; `engine`: of the engine's thread alone.
- `client`: CPU time of the client's process. It is in no other column, but competes with the server for the cores.
- `cache`: CPU time of room for keys and values and of copies for the prefix cache. It goes with the model's size and is
  in no other column.

The rest is CPU time of parts, from a second server that times each call, which adds some microseconds to each:
`sampling` (chains and draw), `bookkeeping` (the rest of the engine's thread), `text` (events to text), `convert` (text
to messages), `gRPC` (all else: event loop, gRPC).
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from treadle_client import AsyncClient, Client
from treadle_plugin_api.backend import Batch
from treadle_plugin_api.backend_factory import BackendFactory
from treadle_plugin_api.drawing import draw
from treadle_plugin_api.hookspecs import hookimpl

CHAINS: dict[str, dict[str, Any]] = {
    "default": {},
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 40": {"top_k": 40},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "0.8, 40, 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}
WHOLE = ("step", "server", "engine", "client", "cache")
PARTS = ("sampling", "bookkeeping", "text", "convert", "gRPC")
NUM_ROWS = 64
WEIGHT_BYTES = 4 << 20
Row = dict[str, float]


class StandIn:
    """A compute backend that computes nothing: logits shaped like a language model's, in an order of its own a row."""

    name = "stand_in"

    def __init__(self) -> None:
        self._weights = np.ones(WEIGHT_BYTES // 4, np.float32)
        self._num_reads = 0

    def prepare(self, config: Any, params: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return rows of logits [NUM_ROWS, vocab]: by rank they fall off as words do, with noise on top."""
        started_s = time.perf_counter()
        self._weights.max()
        took_s = time.perf_counter() - started_s
        self._num_reads = round(float(os.environ[_FORWARD_S]) / took_s)
        rng = np.random.default_rng(0)
        falling = 16 - 1.6 * np.log1p(np.arange(config.vocab_size))
        rows = [rng.permutation(falling + rng.normal(0, 0.7, config.vocab_size)) for _ in range(NUM_ROWS)]
        return np.array(rows, np.float32)

    def cache_dtype(self, prepared: NDArray[Any]) -> np.dtype[Any]:
        """Return what nothing is written to."""
        return np.dtype(np.float32)

    def forward(self, prepared: NDArray[Any], batch: Batch, caches: Any, observe: Any = None) -> NDArray[Any]:
        """Read memory, and return which row of logits each token gets, [tokens, 1]."""
        np.broadcast_to(self._weights, (self._num_reads, len(self._weights))).max(initial=0)
        return (batch.token_ids + batch.positions())[:, None] % NUM_ROWS

    def head(self, prepared: NDArray[Any], hidden: NDArray[Any], observe: Any = None) -> NDArray[Any]:
        """Return copies of rows of logits, [rows, vocab]."""
        return prepared[hidden[:, 0]]

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled draw for the draw."""
        if function is not draw or os.environ[_NUMPY_DRAW]:
            return function
        from treadle_kernels.drawing import draw as compiled_draw

        return compiled_draw


_FORWARD_S, _NUMPY_DRAW = "BENCH_FORWARD_S", "BENCH_NUMPY_DRAW"


@hookimpl
def treadle_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Let the server find the stand-in: this file is a plugin too."""
    register(BackendFactory(StandIn.name, lambda dtype, numerics: StandIn()))


class Clocks:
    """CPU and wall seconds of functions, by name, on whichever thread calls them."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(("model", "sampling", "cache", "text", "convert"), 0.0)
        self.wall_s = dict.fromkeys(self.cpu_s, 0.0)

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        """Time a function under a name."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **keywords: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **keywords)
            finally:
                self.cpu_s[name] += time.thread_time() - cpu_s
                self.wall_s[name] += time.perf_counter() - wall_s

        setattr(owner, attribute, timed)

    def reading(self, num_tokens: int) -> Row:
        """Return what this process has used so far, in seconds."""
        wall_s, total_s, spent = time.perf_counter(), time.process_time(), dict(self.cpu_s)
        thread = next(thread for thread in threading.enumerate() if thread.name == "treadle-engine")
        model_s = spent["model"] + spent["cache"]
        engine_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) - model_s
        server_s = total_s - model_s
        return spent | {
            "tokens": num_tokens,
            "step": wall_s - self.wall_s["model"] - self.wall_s["cache"],
            "server": server_s,
            "engine": engine_s,
            "bookkeeping": engine_s - spent["sampling"],
            "gRPC": server_s - engine_s - spent["text"] - spent["convert"],
        }


def serve(model: str, in_parts: bool, orders: Connection) -> None:
    """Serve with the stand-in; answer each order with the seconds and tokens so far."""
    from treadle_server.cli.observing import keep_responsive
    from treadle_server.config import ServerConfig
    from treadle_server.engine import engine
    from treadle_server.engine.prefix_cache import PrefixCache
    from treadle_server.language_model import LanguageModel
    from treadle_server.language_model.generation import Generation
    from treadle_server.model.decoder import Decoder
    from treadle_server.model.kv_cache import KVCache
    from treadle_server.service import generation_servicer
    from treadle_server.service.app import InferenceServer
    from treadle_server.service.embedded import embedded_server

    clocks, served = Clocks(), []
    load_model = InferenceServer.load_model

    def noted(self: InferenceServer, *args: Any) -> LanguageModel:
        served.append(load_model(self, *args))
        return served[-1]

    InferenceServer.load_model = noted  # type: ignore[method-assign]
    clocks.wrap("model", Decoder, "forward")
    clocks.wrap("model", Decoder, "head")
    clocks.wrap("cache", KVCache, "reserve")
    clocks.wrap("cache", PrefixCache, "store")
    if in_parts:
        clocks.wrap("sampling", engine, "sample_rows")
        clocks.wrap("text", Generation, "feed")
        clocks.wrap("convert", generation_servicer, "_stream_response")
    config = ServerConfig(port=0, backend=StandIn.name, plugin_dirs=(Path(__file__),))
    with embedded_server([model], config) as address:
        keep_responsive()
        orders.send(address)
        while orders.recv():
            orders.send(clocks.reading(served[0].engine.num_generated_tokens))


def read(target: str, knobs: dict[str, Any], num_streams: int, num_tokens: int, marks: Connection) -> None:
    """Read streams; send the CPU seconds when all have begun, and again when the first ends."""
    options = {**knobs, "max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    if num_streams == 1:
        with Client(target) as client:
            for index, _ in enumerate(client.stream([1, 2, 3], **options)):
                if index in (8, num_tokens - 8):
                    marks.send(time.process_time())
        return
    asyncio.run(_read_all(target, options, num_streams, marks))


async def _read_all(target: str, options: dict[str, Any], num_streams: int, marks: Connection) -> None:
    num_begun = 0

    async def one(client: AsyncClient, prompt: list[int]) -> None:
        nonlocal num_begun
        stream = client.stream(prompt, **options)
        await anext(stream)
        num_begun += 1
        if num_begun == num_streams:
            marks.send(time.process_time())
        async for chunk in stream:
            if chunk.finish and num_begun:
                num_begun = 0
                marks.send(time.process_time())

    async with AsyncClient(target) as client:
        await asyncio.gather(*(one(client, [1, 2, 3 + index]) for index in range(num_streams)))


class Server:
    """The server's process."""

    def __init__(self, model: str, *, in_parts: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, orders = context.Pipe()
        self._process = context.Process(target=serve, args=(model, in_parts, orders), daemon=True)
        self._process.start()
        orders.close()  # so that `recv` ends when the process does
        self.address = self._orders.recv()

    def reading(self) -> Row:
        """Return what it has used so far."""
        self._orders.send(True)
        reading: Row = self._orders.recv()
        return reading

    def close(self) -> None:
        """End it."""
        self._orders.send(False)
        self._process.join()


def measure(server: Server, knobs: dict[str, Any], num_streams: int, num_tokens: int) -> Row:
    """Return microseconds a token of one run."""
    context = multiprocessing.get_context("spawn")
    marks, theirs = context.Pipe()
    process = context.Process(target=read, args=(server.address, knobs, num_streams, num_tokens, theirs), daemon=True)
    process.start()
    theirs.close()
    before = {"client": marks.recv(), **server.reading()}
    after = {"client": marks.recv(), **server.reading()}
    process.join()
    tokens = after["tokens"] - before["tokens"]
    return {name: 1e6 * (after[name] - before[name]) / tokens for name in after}


def measure_all(model: str, args: argparse.Namespace, *, in_parts: bool) -> dict[tuple[int, str], Row]:
    """Return the median of the runs for each number of streams and chain."""
    found = {}
    server = Server(model, in_parts=in_parts)
    measure(server, {}, 2, 32)
    for num_streams in args.streams:
        for chain in args.chains:
            runs = [measure(server, CHAINS[chain], num_streams, args.tokens) for _ in range(args.runs)]
            found[num_streams, chain] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    server.close()
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--numpy-draw", action="store_true", help="draw tokens as beside NumPy's arithmetic")
    parser.add_argument("--no-parts", action="store_true", help="leave the second server out")
    args = parser.parse_args()
    os.environ[_FORWARD_S] = str(args.forward_ms / 1e3)
    os.environ[_NUMPY_DRAW] = "1" if args.numpy_draw else ""
    whole = measure_all(args.model, args, in_parts=False)
    parts = {} if args.no_parts else measure_all(args.model, args, in_parts=True)
    table = Table("streams", "chain", *WHOLE, *(PARTS if parts else ()), title="microseconds a token")
    for (num_streams, chain), row in whole.items():
        figures = [row[name] for name in WHOLE] + [parts[num_streams, chain][name] for name in PARTS if parts]
        table.add_row(str(num_streams), chain, *(f"{figure:.0f}" for figure in figures))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
