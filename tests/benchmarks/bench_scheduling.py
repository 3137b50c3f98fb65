"""Measures how requests of different lengths get on beside each other.

    python tests/benchmarks/bench_scheduling.py MODEL [--runs 3]

In process, prompts of random tokens, fast numerics. The prefix cache is off: every prompt is new.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.table import Table
from treadle_server import LanguageModel
from treadle_server.engine.events import EngineEvent, NewToken
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.language_model import Delta, GenerationSpec

SHORT_TOKENS = 32


class Load:
    """Streams of one model; `gaps_s` gathers the times between their tokens while it is not None."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.rng = np.random.default_rng(0)
        self.gaps_s: list[float] | None = None

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that nobody had before."""
        return [int(i) for i in self.rng.integers(10, self.model.vocab_size - 10, num_tokens)]

    def first_token_s(self, num_tokens: int) -> float:
        """Return the time to the first token of a prompt of so many tokens."""
        started_s = time.perf_counter()
        for event in self.model.stream(self.prompt(num_tokens), max_tokens=1):
            if isinstance(event, Delta):
                break
        return time.perf_counter() - started_s

    @contextmanager
    def streams(self, count: int, prompt_tokens: int, *, wait: bool = True) -> Iterator[None]:
        """Keep `count` streams open while the block runs, which begins once all have a token unless told not to."""
        ready = threading.Semaphore(0)
        specs = [GenerationSpec(prompt=self.prompt(prompt_tokens), ignore_eos=True) for _ in range(count)]
        opened = [self.model.start(spec, self._reader(ready)) for spec in specs]
        for _ in opened if wait else ():
            ready.acquire()
        try:
            yield
        finally:
            for generation in opened:
                generation.cancel()

    def _reader(self, ready: threading.Semaphore) -> Callable[[list[EngineEvent]], None]:
        """Return what takes the events of one stream, on the engine thread."""
        tokens_s: list[float] = []

        def read(events: list[EngineEvent]) -> None:
            for event in events:
                if isinstance(event, NewToken):
                    tokens_s.append(time.perf_counter())
                    if len(tokens_s) == 1:
                        ready.release()
                    elif self.gaps_s is not None:
                        self.gaps_s.append(tokens_s[-1] - tokens_s[-2])

        return read


def first_tokens(load: Load, runs: int, long_tokens: int) -> dict[str, float]:
    """Return the median time to the first token of a short prompt in each company, in seconds."""

    def median() -> float:
        return statistics.median(load.first_token_s(SHORT_TOKENS) for _ in range(runs))

    found = {"alone": median()}
    with load.streams(8, long_tokens, wait=False):
        time.sleep(1)
        found[f"beside 8 prompts of {long_tokens} tokens"] = median()
    with load.streams(32, 8):
        found["beside 32 streams"] = median()
    return found


def gaps(load: Load, long_tokens: int) -> dict[str, list[float]]:
    """Return the times between the tokens of 8 streams alone and while a long prompt is computed, in seconds."""
    found = {}
    with load.streams(8, 8):
        load.gaps_s = alone = []
        time.sleep(3)
        load.gaps_s = beside = []
        long_s = load.first_token_s(long_tokens)
        load.gaps_s = None
    found["alone"] = alone
    found[f"beside a prompt of {long_tokens} tokens, which took {long_s:.1f} s"] = beside
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--prefill-beside-decode", type=int, default=EngineLimits().max_prefill_tokens_beside_decode)
    args = parser.parse_args()
    limits = EngineLimits(
        max_prefix_cache_bytes=0,
        max_buffered_tokens=1 << 30,  # nobody says that it has taken anything
        max_prefill_tokens_beside_decode=args.prefill_beside_decode,
    )
    with LanguageModel.load(args.model, engine_limits=limits) as model:
        load = Load(model)
        load.first_token_s(SHORT_TOKENS)
        first, between = first_tokens(load, args.runs, args.long_tokens), gaps(load, args.long_tokens)
    table = Table(f"first token of {SHORT_TOKENS} prompt tokens", "ms, median")
    for name, seconds in first.items():
        table.add_row(name, f"{seconds * 1e3:.0f}")
    Console().print(table)
    table = Table("8 streams, time between two tokens", "ms, median", "95 %", "longest")
    for name, values in between.items():
        table.add_row(name, *(f"{v * 1e3:.0f}" for v in (*np.percentile(values, (50, 95)), max(values))))
    Console().print(table)


if __name__ == "__main__":
    main()
