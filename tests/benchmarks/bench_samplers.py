"""Measures the sampling of one row of logits, stage by stage, and prints a table.

    python tests/benchmarks/bench_samplers.py [--vs transformers] [--vocab 151936] [--rows 1 8 32] [--runs 15]

Microseconds a row through the engine's own path: the chain with its checks, the draw included, in float32. `draw` is
a chain with nothing else in it. Every figure is a median; with `--vs` transformers' processors for the same chain, with
softmax and multinomial, run in turn with ours on the same logits. Both use one thread.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import treadle_samplers.plugin
from rich.console import Console
from rich.table import Table
from treadle_plugin_api import ModelInfo
from treadle_server.engine.chain import BufferPool, SamplingChain, sample_rows
from treadle_server.plugins.registry import StageEntry, StageRegistry

Step = Callable[[], object]
HISTORY = 512

CHAINS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "draw": {},
    "temperature": {"temperature": 0.8},
    "temperature, top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "top_a": {"top_a": 0.2},
    "top_h": {"top_h": 0.4},
    "tfs": {"tfs": 0.95},
    "p_less": {"p_less": True},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4},
    "eta_cutoff": {"eta_cutoff": 2e-3},
    "xtc": {"xtc_probability": 1.0},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "dry": {"dry_multiplier": 0.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "logit_bias": {"logit_bias": {5: 1.0, 7: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(1000))},
    "bad_words": {"bad_words_token_ids": [[5], [6, 7]]},
    "suppress_tokens": {"suppress_tokens": [5, 6, 7]},
    "min_tokens": {"min_tokens": 10**6},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "adaptive_p": {"adaptive_target": 0.5},
    "min_p, adaptive_p": {"min_p": 0.05, "adaptive_target": 0.5},
}


def make_logits(rows: int, vocab: int) -> np.ndarray:
    """Logits [rows, vocab] float32 as models make them: a bell, and a few tokens far above it."""
    rng = np.random.default_rng(0)
    logits = (2.5 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, rng.choice(vocab, 300, replace=False)] += rng.exponential(4, (rows, 300)).astype(np.float32) + 6
    return logits


def make_treadle(knobs: Mapping[str, object], logits: np.ndarray, registry: StageRegistry) -> Step:
    """What the engine does with the rows of one step."""
    info = ModelInfo(
        name="bench",
        vocab_size=logits.shape[1],
        context_length=4096,
        eos_ids=frozenset([0]),
        token_bytes=lambda token_id: b"%d " % token_id,
        encode=lambda text: list(text.encode()),
    )
    chain = SamplingChain.resolve(registry, explicit=knobs, defaults={}, model_info=info)
    history = np.random.default_rng(1).integers(1, logits.shape[1], HISTORY)
    samplers = [chain.begin(history, seed=seed, eos_ids=[0]) for seed in range(len(logits))]
    pool = BufferPool()
    return lambda: sample_rows(samplers, logits, buffers=pool)


class Transformers:
    """The peer's processors on torch, one thread."""

    def __init__(self) -> None:
        import torch
        from transformers.generation import logits_process

        torch.set_num_threads(1)
        self.torch, self.process = torch, logits_process

    def processors(self, name: str) -> list[Any] | None:
        """Those of the chain of this name; None if transformers has none for it."""
        p = self.process
        made: dict[str, Callable[[], list[Any]]] = {
            "draw": list,
            "temperature": lambda: [p.TemperatureLogitsWarper(0.8)],
            "temperature, top_k, top_p": lambda: [
                p.TemperatureLogitsWarper(0.8), p.TopKLogitsWarper(50), p.TopPLogitsWarper(0.95),
            ],
            "top_k": lambda: [p.TopKLogitsWarper(50)],
            "top_p": lambda: [p.TopPLogitsWarper(0.95)],
            "min_p": lambda: [p.MinPLogitsWarper(0.05)],
            "typical_p": lambda: [p.TypicalLogitsWarper(0.9)],
            "top_h": lambda: [p.TopHLogitsWarper(0.4)],
            "epsilon_cutoff": lambda: [p.EpsilonLogitsWarper(3e-4)],
            "eta_cutoff": lambda: [p.EtaLogitsWarper(2e-3, device="cpu")],
            "penalties": lambda: [p.RepetitionPenaltyLogitsProcessor(1.1)],
            "no_repeat_ngram": lambda: [p.NoRepeatNGramLogitsProcessor(3)],
            "logit_bias": lambda: [p.SequenceBiasLogitsProcessor({(5,): 1.0, (7,): -2.0})],
            "bad_words": lambda: [p.NoBadWordsLogitsProcessor([[5], [6, 7]], eos_token_id=0)],
            "suppress_tokens": lambda: [p.SuppressTokensLogitsProcessor([5, 6, 7])],
        }  # fmt: skip
        return made[name]() if name in made else None

    def make(self, name: str, logits: np.ndarray) -> Step | None:
        """The same rows through transformers' processors and its draw."""
        torch = self.torch
        scores = torch.from_numpy(logits)
        if name == "greedy":
            return lambda: scores.argmax(-1)
        if (processors := self.processors(name)) is None:
            return None
        history = torch.from_numpy(np.random.default_rng(1).integers(1, logits.shape[1], (len(logits), HISTORY)))

        def step() -> object:
            row = scores
            for processor in processors:
                row = processor(history, row)
            return torch.multinomial(torch.softmax(row, -1), 1)

        return step


def measure(steps: list[Step | None], runs: int) -> list[float | None]:
    """Median seconds of each step, taken in turn; a turn's first step warms what the other side has left cold."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(runs):
        for step, taken in zip(steps, times, strict=True):
            if step is not None:
                taken.extend(_turn(step))
    return [statistics.median(taken) if taken else None for taken in times]


def _turn(step: Step, num_steps: int = 3) -> list[float]:
    step()
    times = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return times


def main() -> None:
    """Measure every chain and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", choices=["transformers"])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    peer = Transformers() if options.vs else None
    stages = treadle_samplers.plugin.STAGES
    registry = StageRegistry(
        StageEntry(cls=cls, plugin="samplers", distribution="treadle-samplers", version="", built_in=True)
        for cls in stages
    )
    table = Table(
        "chain", *(f"{rows} rows" for rows in options.rows), title=f"microseconds a row, {options.vocab:,} tokens"
    )
    for name, knobs in CHAINS.items():
        cells = []
        for rows in options.rows:
            logits = make_logits(rows, options.vocab)
            steps = [make_treadle(knobs, logits, registry), peer.make(name, logits) if peer else None]
            ours, theirs = measure(steps, options.runs)
            micro = [None if one is None else one / rows * 1e6 for one in (ours, theirs)]
            cells.append(f"{micro[0]:,.0f}" + (f" / {micro[1]:,.0f}" if micro[1] is not None else ""))
        table.add_row(name, *cells)
    Console().print(table)
    if peer:
        print("ours / transformers; its penalties are the repetition penalty alone")


if __name__ == "__main__":
    main()
