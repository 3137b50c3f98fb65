"""Measures the compiled backend against NumPy's, and against peers, and prints a table.

    python tests/benchmarks/bench_kernels.py FOLDER [--vs transformers] [--threads 2] [--runs 5] [--steps 16]

For 1, 8 and 32 streams the time of one decoding step, all layers and the head, and for a prompt of 256 tokens the time
of its pass; every engine in turn within each run, on the same ids, the median over all. Beside the time that went by
there is the CPU time of all threads: on a machine that does other work it is what can be compared. The ceiling is what
a plain read of the weights would take, measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

STREAMS = (1, 8, 32)
PREFIX, PROMPT = 64, 256


class Treadle:
    """A decoder on one of our backends."""

    def __init__(self, folder: Path, backend: Any) -> None:
        from treadle_server.checkpoints.loading import load_checkpoint
        from treadle_server.model.decoder import Decoder

        with load_checkpoint(folder) as checkpoint:
            self.decoder = Decoder(checkpoint.config, checkpoint.params, backend=backend)

    def start(self, prompts: list[list[int]]) -> Any:
        """Read prompts, one stream each."""
        from treadle_plugin_api.backend import Batch

        caches = [self.decoder.new_cache(512) for _ in prompts]
        hidden = self.decoder.forward(Batch.of(prompts), caches)
        self.decoder.head(hidden[[-1]])
        return caches

    def step(self, caches: Any) -> None:
        """Decode one token of every stream."""
        from treadle_plugin_api.backend import Batch

        batch = Batch.of([[5]] * len(caches), [cache.length for cache in caches])
        self.decoder.head(self.decoder.forward(batch, caches))


class Transformers:
    """Eager transformers on torch."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def start(self, prompts: list[list[int]]) -> Any:
        """Read prompts, one stream each."""
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return [out.past_key_values, len(prompts)]

    def step(self, state: Any) -> None:
        """Decode one token of every stream."""
        with self.torch.inference_mode():
            ids = self.torch.full((state[1], 1), 5)
            state[0] = self.model(ids, past_key_values=state[0], use_cache=True).past_key_values


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the milliseconds that went by and those of all threads' CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def read_speed(threads: int) -> float:
    """Return the bytes a second, in GB, that plain reads of 256 MB give, on all threads at once."""
    import numpy as np

    array = np.ones(1 << 26, np.float32)
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = [timed(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))[0] for _ in range(7)]
    return array.nbytes / statistics.median(times) / 1e6


def measure(engines: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Run every engine in turn; return the times by engine and what was measured."""
    import numpy as np

    rng = np.random.default_rng(0)
    times: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in engines}
    for _ in range(args.runs):
        for streams in STREAMS:
            prompts = rng.integers(100, 1000, (streams, PREFIX)).tolist()
            states = {name: engine.start(prompts) for name, engine in engines.items()}
            for _ in range(args.steps):
                for name, engine in engines.items():
                    found = times[name].setdefault(f"decode {streams}", [])
                    found.append(timed(partial(engine.step, states[name])))
        prompt = [rng.integers(100, 1000, PROMPT).tolist()]
        for name, engine in engines.items():
            times[name].setdefault(f"prefill {PROMPT}", []).append(timed(partial(engine.start, prompt)))
    return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vs", choices=["transformers"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)  # before NumPy is imported
    from rich.console import Console
    from rich.table import Table
    from treadle_kernels.backend import KernelBackend
    from treadle_kernels.warm_up import ensure_compiled

    ensure_compiled()
    engines: dict[str, Any] = {
        "kernels, weights as stored": Treadle(args.folder, KernelBackend(args.threads)),
        "kernels_int8": Treadle(args.folder, KernelBackend(args.threads, quantise=True)),
        "numpy, float32": Treadle(args.folder, "numpy"),
        "numpy, float32, reproducible": Treadle(args.folder, _reproducible()),
    }
    if args.vs:
        for dtype in ("float32", "bfloat16"):
            engines[f"transformers, {dtype}"] = Transformers(args.folder, dtype, args.threads)
    times = measure(engines, args)
    table = Table("engine", "what", "tokens/s", "ms", "CPU ms")
    for name, found in times.items():
        for what, pairs in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
            table.add_row(name, what, f"{1e3 * int(what.split()[1]) / wall:.1f}", f"{wall:.1f}", f"{cpu:.1f}")
    console = Console()
    console.print(table)
    speed, size = read_speed(args.threads), sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    console.print(
        f"{args.threads} threads; a plain read gives {speed:.1f} GB/s: {1e9 * speed / size:.0f} tokens/s at most"
    )
    console.print(f"load average {os.getloadavg()[0]:.1f}")


def _reproducible() -> Any:
    from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend

    return ReproducibleNumpyBackend()


if __name__ == "__main__":
    main()
