"""Learning from rewards: sample from the server, score the samples, train on them, publish, and sample again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Choice, Client, TrainingClient, TrainingRow
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

Run = Callable[..., AbstractContextManager[str]]
PROMPT = [1, 40, 41]
NUM_SAMPLES, NUM_TOKENS, NUM_ROUNDS = 24, 8, 14


def reward(choice: Choice) -> float:
    """Return the share of even tokens."""
    return sum(token_id % 2 == 0 for token_id in choice.token_ids) / len(choice.token_ids)


def row(choice: Choice, advantage: float) -> TrainingRow:
    """Return what is learnt from a sample: its own tokens, none of the prompt's."""
    sampled = [entry.logprob or 0.0 for entry in choice.logprobs]
    none = [0.0] * len(PROMPT)
    return TrainingRow(
        [*PROMPT, *choice.token_ids],
        labels=[*[-100] * len(PROMPT), *choice.token_ids],
        logprobs=[*none, *sampled],
        advantages=[*none, *[advantage] * len(sampled)],
    )


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_rewards_rise(training: Run, tiny_folder: Path, tmp_path: Path, lora: dict[str, Any] | None) -> None:
    """Samples of the published weights, or of the published adapter, are rewarded more and more."""
    config = ServerConfig(port=0, model_roots=(tmp_path,), grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as served:
        target = {"address": served, "model": "tiny"}
        settings = {"publish_root": tmp_path / "published", "target": target, "lora": lora}
        with training(tiny_folder, **settings) as address, TrainingClient(address) as trainer, Client(served) as client:
            rewards = list(rounds(trainer, client, lr=0.02 if lora else 0.005))
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2


def rounds(trainer: TrainingClient, client: Client, lr: float) -> list[float]:
    """Do rounds of sampling and learning; return the mean reward of each."""
    means = []
    adapter = None
    for number in range(NUM_ROUNDS):
        knobs: dict[str, Any] = {"temperature": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number}
        answer = client.generate(
            PROMPT, n=NUM_SAMPLES, adapter=adapter, logprobs="raw", token_ids=True, use_model_defaults=False, **knobs
        )
        scores = [reward(choice) for choice in answer.choices]
        means.append(sum(scores) / len(scores))
        rows = [row(choice, score - means[-1]) for choice, score in zip(answer.choices, scores, strict=True)]
        trainer.step(rows, lr=lr, loss="importance_sampling")
        adapter = trainer.publish_weights(f"round {number}").adapter or None
    return means
