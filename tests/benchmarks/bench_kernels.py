"""Measures the compiled backend beside NumPy's and beside peers, and prints a table.

    python tests/benchmarks/bench_kernels.py FOLDER [--engines NAME ...] [--gguf FOLDER] [--threads 2] [--rounds 5]

What is measured: one decoding step of 1, 8 and 32 streams behind 64 tokens each, all layers and the head; and the pass
of a prompt of 256 and of 2,048 tokens. Every engine runs in a process of its own and they take turns, 32 steps each,
so that what else the machine does falls on all alike. Figures are medians over all turns. Beside the time that went by
there is the CPU time of all threads: on a busy machine that is what can be compared.

The ceiling is what a plain read gives, measured between the turns by as many threads: no engine that reads every weight
for every token can be faster.

Engines whose names begin with llama.cpp need `pip install llama-cpp-python` and a folder with f32.gguf, bf16.gguf,
q8_0.gguf and q4_0.gguf of the same model; those that begin with transformers need torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STREAMS, PROMPTS = (1, 8, 32), (256, 2048)
PREFIX, STEPS_A_TURN, ROOM = 64, 32, 192
# Steps at the beginning of a turn that are not counted: threads wake up, and caches hold what others left.
WARMUP_STEPS = 4
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TREADLE_KERNELS_THREADS")
Pair = tuple[float, float]


class Treadle:
    """A decoder on one of our backends."""

    def __init__(self, folder: Path, backend: str, **options: Any) -> None:
        from treadle_server import LanguageModel

        self.decoder = LanguageModel.load(folder, backend=backend, **options).engine.weights.decoder

    def read(self, prompts: list[list[int]]) -> Any:
        """Read prompts, one stream each, and work out the last one's logits."""
        from treadle_plugin_api.backend import Batch

        caches = [self.decoder.new_cache(len(prompt) + ROOM) for prompt in prompts]
        self.decoder.head(self.decoder.forward(Batch.of(prompts), caches)[[-1]])
        return caches

    def step(self, caches: Any) -> None:
        """Decode one token of every stream."""
        from treadle_plugin_api.backend import Batch

        batch = Batch.of([[5]] * len(caches), [cache.length for cache in caches])
        self.decoder.head(self.decoder.forward(batch, caches))


class Transformers:
    """Eager transformers on torch."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def read(self, prompts: list[list[int]]) -> Any:
        """Read prompts, one stream each, and work out their last logits."""
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return [out.past_key_values, len(prompts)]

    def step(self, state: Any) -> None:
        """Decode one token of every stream."""
        with self.torch.inference_mode():
            ids = self.torch.full((state[1], 1), 5)
            state[0] = self.model(ids, past_key_values=state[0], use_cache=True).past_key_values


class LlamaCpp:
    """llama.cpp by its C interface, one sequence for each stream."""

    def __init__(self, folder: Path, name: str) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # called as long as the model lives
        llama_cpp.llama_log_set(self._log, None)
        path = str(folder / f"{name}.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        self.batch = llama_cpp.llama_batch_init(max(PROMPTS), 0, 1)
        self._make = lru_cache(self._new_context)

    def _new_context(self, num_streams: int, length: int) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = num_streams * (length + ROOM), max(PROMPTS), num_streams
        params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
        return self.lib.llama_init_from_model(self.model, params)

    def read(self, prompts: list[list[int]]) -> Any:
        """Read prompts, one stream each, and work out their last logits."""
        self.context = self._make(len(prompts), len(prompts[0]))
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self._decode([(number, 0, prompt) for number, prompt in enumerate(prompts)])
        return [len(prompt) for prompt in prompts]

    def step(self, lengths: Any) -> None:
        """Decode one token of every stream."""
        self._decode([(number, length, [5]) for number, length in enumerate(lengths)])
        lengths[:] = [length + 1 for length in lengths]

    def _decode(self, parts: list[tuple[int, int, list[int]]]) -> None:
        batch, place = self.batch, 0
        for number, start, ids in parts:
            for offset, token_id in enumerate(ids):
                batch.token[place], batch.pos[place] = token_id, start + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, number
                batch.logits[place] = offset == len(ids) - 1
                place += 1
        batch.n_tokens = place
        assert self.lib.llama_decode(self.context, batch) == 0
        self.lib.llama_get_logits_ith(self.context, place - 1)  # waits for them


ENGINES: dict[str, Callable[[Path, Path], Any]] = {
    "kernels": lambda folder, _: Treadle(folder, "kernels"),
    "kernels activations bf16": lambda folder, _: Treadle(folder, "kernels", activations="bf16"),
    "kernels int8": lambda folder, _: Treadle(folder, "kernels", quantize="int8"),
    "kernels int4": lambda folder, _: Treadle(folder, "kernels", quantize="int4"),
    "numpy": lambda folder, _: Treadle(folder, "numpy"),
    "numpy reproducible": lambda folder, _: Treadle(folder, "numpy", numerics="reproducible"),
    "transformers float32": lambda folder, _: Transformers(folder, "float32"),
    "transformers bfloat16": lambda folder, _: Transformers(folder, "bfloat16"),
    "llama.cpp f32": lambda _, gguf: LlamaCpp(gguf, "f32"),
    "llama.cpp bf16": lambda _, gguf: LlamaCpp(gguf, "bf16"),
    "llama.cpp q8_0": lambda _, gguf: LlamaCpp(gguf, "q8_0"),
    "llama.cpp q4_0": lambda _, gguf: LlamaCpp(gguf, "q4_0"),
}
OWN = tuple(name for name in ENGINES if not name.startswith(("transformers", "llama.cpp")))


def timed(function: Callable[[], Any]) -> Pair:
    """Return the milliseconds that went by and those of all threads' CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def serve(name: str, folder: Path, gguf: Path) -> None:
    """Run as the child: a line with prompts and a number of steps in, a line with the times out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    engine = ENGINES[name](folder, gguf)
    print(json.dumps([]), file=answers, flush=True)
    for line in sys.stdin:
        prompts, num_steps = json.loads(line)
        states: list[Any] = []
        read = timed(lambda: states.append(engine.read(prompts)))  # noqa: B023 - called at once
        steps = [timed(partial(engine.step, states[0])) for _ in range(num_steps)]
        print(json.dumps(steps[WARMUP_STEPS:] or [read]), file=answers, flush=True)


class Child:
    """An engine in its process."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        limits = dict.fromkeys(THREAD_VARIABLES, str(args.threads))
        command = [sys.executable, __file__, str(args.folder), "--gguf", str(args.gguf), "--serve", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | limits
        )

    def wait(self) -> None:
        """Wait until it has loaded its model: loading would disturb the others' turns."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self, prompts: list[list[int]], num_steps: int) -> list[Pair]:
        """Read prompts and take steps; return the times of the steps, or of the prompts where there are none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([prompts, num_steps]), file=self._process.stdin, flush=True)
        return [(wall, cpu) for wall, cpu in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def turns() -> list[tuple[str, int, list[list[int]], int]]:
    """Return what is measured: its name, tokens that each time stands for, prompts and steps."""
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(100, 1000) for _ in range(length)]

    decode = [
        (f"{num} streams", num, [prompt(PREFIX) for _ in range(num)], STEPS_A_TURN + WARMUP_STEPS) for num in STREAMS
    ]
    return decode + [(f"prompt of {length}", length, [prompt(length)], 0) for length in PROMPTS]


def measure(children: dict[str, Child], args: argparse.Namespace) -> tuple[dict[tuple[str, str], list[Pair]], float]:
    """Let the engines take turns; return the times by engine and what was measured, and the speed of a plain read."""
    times: dict[tuple[str, str], list[Pair]] = {}
    speeds = []
    for child in children.values():
        child.wait()
    for _ in range(args.rounds):
        for what, _, prompts, num_steps in turns():
            for name, child in children.items():
                times.setdefault((name, what), []).extend(child.run(prompts, num_steps))
        speeds.append(read_speed(args.threads))
    return times, statistics.median(speeds)


def forget(folders: list[Path]) -> None:
    """Have the system drop what it holds of models' files: read anew, they are mapped in huge pages."""
    for path in [path for folder in folders for kind in ("*.safetensors", "*.gguf") for path in folder.glob(kind)]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(threads: int) -> float:
    """Return the bytes a second, in GB, that plain reads of 256 MB give, on so many threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    array = np.ones(1 << 26, np.float32)
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = [timed(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))[0] for _ in range(5)]
    return array.nbytes / statistics.median(times) / 1e6


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(OWN))
    parser.add_argument("--gguf", type=Path, default=Path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.folder, args.gguf)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the plain read, before NumPy is imported
    forget([args.folder, args.gguf])
    children = {name: Child(name, args) for name in args.engines}
    try:
        times, speed = measure(children, args)
    finally:
        for child in children.values():
            child.close()
    table = Table("what", "engine", "tokens/s", "ms", "CPU ms")
    for what, num_tokens, _, _ in turns():
        for name in args.engines:
            wall, cpu = (statistics.median(column) for column in zip(*times[name, what], strict=True))
            table.add_row(what, name, f"{1e3 * num_tokens / wall:.1f}", f"{wall:.1f}", f"{cpu:.1f}")
        table.add_section()
    console, size = Console(width=110), sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    console.print(table)
    console.print(
        f"{args.threads} threads; a plain read gives {speed:.1f} GB/s: {1e9 * speed / size:.0f} tokens/s at most"
    )
    console.print(f"for {size / 1e6:.0f} MB of weights. Load average {os.getloadavg()[0]:.1f}.")
    return None


if __name__ == "__main__":
    main()
