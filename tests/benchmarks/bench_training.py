"""Measures a training step beside PyTorch and prints a table.

    python tests/benchmarks/bench_training.py [MODEL:ROWSxTOKENS ...] [--engines kernels torch] [--threads 1]

Engines are the compute backends `numpy` and `kernels`, and `torch`; ratios are to the last one named.

A step is forward, backward, clipping and AdamW, in float32, of rows of one length. Each engine runs in a process of its
own; they take their steps in turn, so that what else the machine does falls on all alike, and the others wait while one
works. Every rate is a median, a ratio that of the pairs' ratios. The rate by CPU second says what a quiet machine would
give where other processes take the cores away. Memory is what a process needed at its highest beyond what it had once
everything was imported and nothing loaded; it counts the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

LR, BETAS, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = {"numpy": ("numpy",), "kernels": ("numba", "llvmlite"), "torch": ("torch", "transformers")}
# Above this share of the cores in other processes' hands, the machine counts as busy.
BUSY_SHARE = 0.05

WARMUP_STEPS = 1

Rows = list[list[int]]
Step = Callable[[Rows], float]


def make_treadle(backend: str) -> Callable[[Path], Step]:
    """Import treadle; the result loads a folder and returns a step that returns the loss."""
    from treadle_server import Trainer

    if backend == "kernels":  # the compiler, which comes when a model is loaded
        import_module("treadle_kernels.training_backend")

    def load(folder: Path) -> Step:
        trainer = Trainer.load(folder, backend=backend)

        def step(rows: Rows) -> float:
            result = trainer.forward_backward(rows)
            trainer.optim_step(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, grad_clip_norm=CLIP_NORM)
            return result.loss

        return step

    return load


def make_torch() -> Callable[[Path], Step]:
    """Import PyTorch and transformers; the result loads a folder and returns a step that returns the loss."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    def load(folder: Path) -> Step:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

        def step(rows: Rows) -> float:
            ids = torch.tensor(rows)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return step

    return load


ENGINES = {"numpy": partial(make_treadle, "numpy"), "kernels": partial(make_treadle, "kernels"), "torch": make_torch}


def serve(engine: str, folder: Path) -> None:
    """Run as the child: a line of rows in, a line with the seconds, the loss and the highest memory out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    load = ENGINES[engine]()
    before_mb = memory_mb("VmRSS")
    step = load(folder)
    for line in sys.stdin:
        rows = json.loads(line)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loss = step(rows)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        print(json.dumps([seconds, cpu_s, loss, memory_mb("VmHWM") - before_mb]), file=answers, flush=True)


def memory_mb(field: str) -> float:
    """A field of this process's memory: VmRSS is what it has now, VmHWM the most it ever had (Linux only)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


@dataclass(frozen=True)
class Answer:
    """What a child says of a step; `cpu_s` counts all its threads."""

    seconds: float
    cpu_s: float
    loss: float
    peak_mb: float


class Engine:
    """A child process with a model loaded."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        limits = dict.fromkeys(THREAD_VARIABLES, str(threads))
        command = [sys.executable, __file__, "--serve", name, str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | limits
        )

    def step(self, rows: Rows) -> Answer:
        """Take one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(rows), file=self._process.stdin, flush=True)
        return Answer(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def running(names: list[str], folder: Path, threads: int) -> Iterator[dict[str, Engine]]:
    """The engines with the folder loaded; ended afterwards."""
    engines = {name: Engine(name, folder, threads) for name in names}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


@dataclass(frozen=True)
class Task:
    """A model with the shape of its batches, written MODEL:ROWSxTOKENS."""

    model: str
    num_rows: int
    num_tokens: int

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read the command line's form."""
        found = re.fullmatch(r"(.+):(\d+)x(\d+)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"must be MODEL:ROWSxTOKENS, but is {text}")
        return cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{Path(self.model).name}, {self.num_rows} x {self.num_tokens}"

    def rows(self, vocab_size: int, seed: int) -> Rows:
        """Draw a batch."""
        draw = random.Random(seed)
        return [[draw.randrange(vocab_size) for _ in range(self.num_tokens)] for _ in range(self.num_rows)]


@dataclass(frozen=True)
class Measured:
    """What was measured of a task: each engine's answers, and what share of all cores other processes had meanwhile."""

    answers: dict[str, list[Answer]]
    others_share: float

    def peak_mb(self, engine: str) -> float:
        """The highest memory of all steps."""
        return max(answer.peak_mb for answer in self.answers[engine])

    def loss_difference(self) -> float:
        """By what share of it the engines' losses differ at most: they must do the same work."""
        steps = zip(*self.answers.values(), strict=True)
        losses = [[answer.loss for answer in answers] for answers in steps]
        return max(max(step) / min(step) - 1 for step in losses)


TASKS = (Task("smollm2-135m-instruct", 4, 256), Task("stories", 32, 128))


def measure(task: Task, folder: Path, names: list[str], num_steps: int, threads: int) -> Measured:
    """Let the engines take steps in turn, the first of them uncounted."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    with running(names, folder, threads) as engines:
        for number in range(num_steps + WARMUP_STEPS):
            if number == WARMUP_STEPS:
                start_s, start_busy_s = time.perf_counter(), busy_s()
            rows = task.rows(vocab_size, number)
            for name in names if number % 2 else names[::-1]:
                answers[name].append(engines[name].step(rows))
        wall_s, all_busy_s = time.perf_counter() - start_s, busy_s() - start_busy_s
    counted = {name: every[WARMUP_STEPS:] for name, every in answers.items()}
    own_s = sum(answer.cpu_s for every in counted.values() for answer in every)
    return Measured(counted, max(0.0, all_busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))


def busy_s() -> float:
    """Seconds that all cores together have worked since the machine started (Linux only)."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def add_rows(table: Table, task: Task, measured: Measured) -> None:
    """Add a line for every engine, with its ratios to the last."""
    names = list(measured.answers)
    for name in names:
        steps, peak_mb = measured.answers[name], measured.peak_mb(name)
        seconds, cpu_s = ([getattr(step, field) for step in steps] for field in ("seconds", "cpu_s"))
        ratios = ["", "", ""]
        if name != names[-1]:
            pairs = list(zip(measured.answers[names[-1]], steps, strict=True))
            ratios[0] = f"{statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs):.2f}"
            ratios[1] = f"{statistics.median(theirs.cpu_s / ours.cpu_s for theirs, ours in pairs):.2f}"
            ratios[2] = f"{peak_mb / measured.peak_mb(names[-1]):.2f}"
        tokens = task.num_rows * task.num_tokens
        rates = f"{tokens / statistics.median(seconds):,.0f}", f"{tokens / statistics.median(cpu_s):,.0f}"
        table.add_row(str(task), name, rates[0], ratios[0], rates[1], ratios[1], f"{peak_mb:,.0f}", ratios[2])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", type=Task.parse, metavar="MODEL:ROWSxTOKENS")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], Path(args.serve[1]))
    from treadle_server.checkpoints.store import ModelStore

    store = ModelStore()
    columns = "step", "engine", "tokens/s", "ratio", "tokens/CPU s", "ratio", "peak MB", "ratio"
    table = Table(*columns, title="float32, AdamW, clipping")
    shares, differences = [], []
    for task in args.tasks or TASKS:
        measured = measure(task, store.resolve(task.model), args.engines, args.steps, args.threads)
        add_rows(table, task, measured)
        shares.append(measured.others_share)
        differences.append(measured.loss_difference())
    console = Console(width=110)  # a pipe would have 80 columns
    console.print(table)
    packages = [f"{name} {version(name)}" for engine in args.engines for name in PACKAGES[engine]]
    console.print(f"{args.threads} of {os.cpu_count()} cores, {platform.machine()}; {', '.join(packages)}")
    console.print(f"Losses differ by {max(differences):.0e} of themselves at most.")
    state = "busy; trust the ratios only" if max(shares) > BUSY_SHARE else "quiet"
    busy = ", ".join(f"{share:.0%}" for share in shares)
    console.print(f"The machine was {state}: other processes had {busy} of the cores.")
    return None


if __name__ == "__main__":
    main()
