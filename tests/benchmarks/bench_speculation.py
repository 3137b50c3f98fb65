"""Measures what prompt lookup gains on repetitive text, paired with plain decoding in one run.

    python tests/benchmarks/bench_speculation.py MODEL [--runs 3]

Every figure is a median; the two take turns. Greedy, one stream, in process.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from treadle_server import LanguageModel

PROMPT = (
    "Copy the list exactly.\n"
    + "".join(f"{i}. The cat number {i} chases the mouse number {i}.\n" for i in range(1, 13))
    + "\nThe same list again:\n1. The cat number 1 chases the mouse"
)


def measure(model: LanguageModel, num_new: int, **options: Any) -> tuple[float, float, tuple[int, ...]]:
    """Return tokens per second, accepted tokens per drafted one, and the tokens."""
    choice = model.generate(PROMPT, temperature=0, max_tokens=num_new, ignore_eos=True, **options).choices[0]
    finish = choice.finish
    rate = (finish.num_generated_tokens - 1) / finish.timings.decode_s
    return rate, finish.num_accepted_tokens / max(finish.num_draft_tokens, 1), choice.token_ids


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3, 5, 8])
    args = parser.parse_args()
    settings: dict[str, dict[str, Any]] = {"plain": {}}
    for count in args.draft_tokens:
        settings[f"prompt lookup, {count}"] = {"speculation": "prompt_lookup", "num_draft_tokens": count}
    rates: dict[str, list[float]] = {name: [] for name in settings}
    accepted: dict[str, float] = {}
    with LanguageModel.load(args.model) as model:
        for _ in range(args.runs):
            for name, options in settings.items():
                rate, accepted[name], _ids = measure(model, args.new_tokens, **options)
                rates[name].append(rate)
    table = Table("decoding", "tokens/s", "times plain", "drafts accepted")
    plain = statistics.median(rates["plain"])
    for name, runs in rates.items():
        rate = statistics.median(runs)
        table.add_row(name, f"{rate:.1f}", f"{rate / plain:.2f}", f"{accepted[name]:.0%}" if settings[name] else "-")
    Console().print(table)


if __name__ == "__main__":
    main()
