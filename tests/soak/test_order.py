"""Reproducible mode: whatever runs beside a request, in whatever order, and with however little memory, same tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client

NUM_AT_ONCE = 48
# A few whole sequences of the tiny model; far less than the requests at once want.
LITTLE_KV_BYTES = 1 << 18


def requests(count: int) -> list[tuple[Any, dict[str, Any]]]:
    """Return prompts with knobs of every kind, the same every time."""
    source = random.Random(42)
    openings = [[source.randrange(3, 250) for _ in range(60)] for _ in range(3)]
    return [(prompt(source, openings), knobs(source, seed)) for seed in range(count)]


def prompt(source: random.Random, openings: list[list[int]]) -> Any:
    """Return a chat, a text, tokens, or tokens that begin like those of others."""
    own = [source.randrange(3, 250) for _ in range(source.randrange(1, 24))]
    return source.choice(
        [
            own,
            source.choice(openings)[: source.randrange(8, 60)] + own,
            "the cat chases the mouse; the cat chases the " + chr(97 + len(own)),
            [{"role": "user", "content": f"猫 {own[0]}"}],
        ]
    )


def knobs(source: random.Random, seed: int) -> dict[str, Any]:
    """Return knobs: how to draw, when to stop, and one thing more."""
    how = source.choice(
        [
            {"temperature": 0},
            {"temperature": 1.0},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
            {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "no_repeat_ngram_size": 2},
            {"mirostat": 2, "mirostat_tau": 4.0},
            {"xtc_probability": 0.5, "dry_multiplier": 0.8},
        ]
    )
    when = source.choice(
        [{}, {"stop": ["e", "qu"]}, {"stop_token_ids": [9, 77], "min_tokens": 3}, {"ignore_eos": True}]
    )
    more = source.choice(
        [
            {},
            {"n": source.randrange(2, 5)},
            {"guidance_scale": 1.5, "negative_prompt": [5, 6, 7]},
            {"speculation": "prompt_lookup", "num_draft_tokens": 4},
            {"adapter": "cats"},
            {"logprobs": "raw", "top_logprobs": 3, "prompt_logprobs": True},
            {"stages": [("grammar", {"regex": "[a-z ]+"})]},
        ]
    )
    return {
        "max_tokens": source.randrange(4, 33),
        "seed": seed,
        "token_ids": True,
        "priority": seed % 3,
        **how,
        **when,
        **more,
    }


def answer(client: Client, request: tuple[Any, dict[str, Any]]) -> list[Any]:
    """Return what must not differ: tokens, text, reason and log-probabilities of each choice."""
    given, options = request
    made = client.generate(given, **options)
    beside = made.prompt_info.prompt_logprobs
    return [(c.token_ids, c.text, c.finish.reason, c.logprobs, beside) for c in made.choices]


@pytest.mark.counts(default=40, full=500)
def test_order_company_and_memory_change_no_token(
    spawn: Callable[..., Any],
    configured: Callable[..., Path],
    tiny_folder: Path,
    golden: Path,
    figure: Callable[[str], None],
    count: int,
) -> None:
    """One by one, and shuffled at once: with a prefix cache, without one, and where sequences give way to others."""
    command = [
        "serve",
        f"tiny={tiny_folder}",
        "--port",
        "0",
        "--adapter",
        f"cats={golden / 'adapters' / 'llama_plain'}",
    ]
    wanted = requests(count)

    def ask(at_once: int, rounds: int = 1, **settings: Any) -> tuple[list[list[Any]], Any]:
        file = configured(numerics="reproducible", max_queued_requests=count, **settings)
        order = [*range(count)]
        random.Random(at_once).shuffle(order)
        with spawn(*command, "--config", file) as server, Client(server.address, timeout_s=600) as client:
            for _ in range(rounds):
                with ThreadPoolExecutor(at_once) as pool:
                    found = dict(zip(order, pool.map(lambda i: answer(client, wanted[i]), order), strict=True))
            assert not server.faults()
            return [found[i] for i in range(count)], client.get_load()[0]

    begun_s = time.monotonic()
    expected, _ = ask(1, max_prefix_cache_bytes=0)
    alone, _ = ask(NUM_AT_ONCE, max_prefix_cache_bytes=0)
    cached, with_cache = ask(NUM_AT_ONCE, rounds=2)  # the second finds what the first has left
    tight, little = ask(NUM_AT_ONCE, max_kv_bytes=LITTLE_KV_BYTES)
    figure(
        f"order: {count} requests one by one, then shuffled {NUM_AT_ONCE} at once without a prefix cache, twice with "
        f"one ({with_cache.num_prefix_hit_tokens} tokens from it) and with {LITTLE_KV_BYTES} bytes of keys and values "
        f"({little.num_preemptions} preemptions); all tokens equal, {time.monotonic() - begun_s:.0f} s"
    )
    for number, (first, *others) in enumerate(zip(expected, alone, cached, tight, strict=True)):
        assert [first] * 3 == others, wanted[number]
    assert with_cache.num_prefix_hit_tokens > 0
    assert little.num_preemptions > 0
