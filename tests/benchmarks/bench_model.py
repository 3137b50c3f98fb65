"""Measures a model folder through a real server and client, and prints a table.

    python tests/benchmarks/bench_model.py FOLDER [--vs transformers] [--backend NAME] [--numerics MODE] [--runs 3]

For 1 and 8 streams: prefill rate, decode rate, time to first token, and the time each token spends outside the
model (engine, sampling, gRPC, detokenizing, client). Every figure is a median over runs; with `--vs` the
peer runs in the same process in turn with treadle, on the same prompts, in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figures:
    """One run's figures; None where a peer cannot tell."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    outside_us_per_token: float | None


class ModelClock:
    """Adds up the seconds that a decoder computes, by wrapping its two calls."""

    def __init__(self, decoder: Any) -> None:
        self.seconds = 0.0
        decoder.forward = self._timed(decoder.forward)
        decoder.head = self._timed(decoder.head)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class Treadle:
    """A treadle server on loopback with its client, in this process."""

    def __init__(self, folder: Path, backend: str, numerics: str) -> None:
        from treadle_server.config import ServerConfig
        from treadle_server.plugins.manager import PluginManager
        from treadle_server.service.app import InferenceServer

        self.loop = asyncio.new_event_loop()
        settings = {"backend": backend, "numerics": numerics, "max_prefill_tokens": 512}
        config = ServerConfig(port=0, max_prefix_cache_bytes=0, **settings)  # each run reads its prompts anew
        self.server = self.loop.run_until_complete(self._make(InferenceServer, config, PluginManager.load()))
        self.target = f"127.0.0.1:{self.loop.run_until_complete(self.server.start())}"
        self.model = self.server.load_model(str(folder))
        self.server.models.add(self.model)
        self.loop.run_until_complete(self.server.open())
        self.clock = ModelClock(self.model.decoder)

    @staticmethod
    async def _make(kind: Any, *args: Any) -> Any:
        return kind(*args)

    def run(self, prompts: list[list[int]], num_new: int) -> Figures:
        """Stream an answer to every prompt at once."""
        return self.loop.run_until_complete(self._run(prompts, num_new))

    async def _run(self, prompts: list[list[int]], num_new: int) -> Figures:
        from treadle_client import AsyncClient

        self.clock.seconds = 0.0
        async with AsyncClient(self.target) as client:
            start = time.perf_counter()
            streams = (self._stream(client, prompt, num_new) for prompt in prompts)
            times = await asyncio.gather(*streams)
            wall_s = time.perf_counter() - start
        first_s = [t[0] - start for t in times]
        decode_s = max(t[-1] for t in times) - max(t[0] for t in times)
        num_decoded = sum(sum(moment > max(t[0] for t in times) for moment in t) for t in times)
        return Figures(
            prefill_tokens_per_s=sum(map(len, prompts)) / max(first_s),
            decode_tokens_per_s=num_decoded / decode_s,
            first_token_s=statistics.median(first_s),
            outside_us_per_token=1e6 * (wall_s - self.clock.seconds) / sum(map(len, times)),
        )

    async def _stream(self, client: Any, prompt: list[int], num_new: int) -> list[float]:
        stream = client.stream(prompt, temperature=0, max_tokens=num_new, ignore_eos=True, token_ids=True)
        return [time.perf_counter() async for chunk in stream if chunk.token_ids]

    def close(self) -> None:
        """Stop the server."""
        self.loop.run_until_complete(self.server.stop(0))
        self.loop.close()


class Transformers:
    """Eager transformers on torch in float32, the peer."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, prompts: list[list[int]], num_new: int) -> Figures:
        """Decode greedily, all prompts (of one length) as one batch."""
        torch = self.torch
        with torch.inference_mode():
            start = time.perf_counter()
            out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            first_s = time.perf_counter() - start
            for _ in range(num_new - 1):
                out = self.model(ids, past_key_values=out.past_key_values, use_cache=True)
                ids = out.logits[:, -1].argmax(-1, keepdim=True)
            decode_s = time.perf_counter() - start - first_s
        return Figures(
            prefill_tokens_per_s=sum(map(len, prompts)) / first_s,
            decode_tokens_per_s=len(prompts) * (num_new - 1) / decode_s,
            first_token_s=first_s,
            outside_us_per_token=None,
        )


def median(runs: list[Figures]) -> Figures:
    """Return the median of each figure over the runs."""
    columns = zip(*(vars(run).values() for run in runs), strict=True)
    return Figures(*(None if None in column else statistics.median(column) for column in columns))


def measure(engines: dict[str, Any], num_streams: int, args: argparse.Namespace) -> dict[str, Figures]:
    """Run every engine in turn, `args.runs` times after one run to warm up."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 1000, (num_streams, args.prompt_tokens)).tolist()
    results: dict[str, list[Figures]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.run([prompt[:8] for prompt in prompts], 2)
    for _ in range(args.runs):
        for name, engine in engines.items():
            results[name].append(engine.run(prompts, args.new_tokens))
    return {name: median(runs) for name, runs in results.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vs", choices=["transformers"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--numerics", choices=["fast", "reproducible"], default="fast")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    treadle = Treadle(args.folder, args.backend, args.numerics)
    after_load_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    engines: dict[str, Any] = {f"treadle ({args.numerics})": treadle}
    if args.vs:
        engines[args.vs] = Transformers(args.folder)
    table = Table("engine", "streams", "prefill tok/s", "decode tok/s, sum", "first token ms", "outside model us/tok")
    for num_streams in args.streams:
        for name, figures in measure(engines, num_streams, args).items():
            outside = "-" if figures.outside_us_per_token is None else f"{figures.outside_us_per_token:.0f}"
            rates = f"{figures.prefill_tokens_per_s:.0f}", f"{figures.decode_tokens_per_s:.1f}"
            table.add_row(name, str(num_streams), *rates, f"{1e3 * figures.first_token_s:.0f}", outside)
    treadle.close()
    console = Console()
    console.print(table)
    console.print(f"peak memory after treadle's load: {after_load_mb:.0f} MB")


if __name__ == "__main__":
    main()
