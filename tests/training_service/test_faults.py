"""Faults of the trainer's own: they end one call, and never leave half a step unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from treadle_client import ConflictError, ServerInternalError, TrainingClient
from treadle_server.service.training.metrics import MetricsLog, StepMetrics
from treadle_server.training import Trainer

Run = Callable[..., AbstractContextManager[str]]
IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4]]


def failing(error: BaseException) -> Callable[..., Any]:
    """Return a method that raises."""

    def method(*_: Any, **__: Any) -> Any:
        raise error

    return method


def test_an_interrupted_step_is_never_built_upon(client: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault in it the weights may be half changed: everything is refused until a checkpoint is loaded."""
    client.save_checkpoint("good")
    expected = client.compute_loss(IDS)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "optim_step", failing(RuntimeError("a bug")))
        with pytest.raises(ServerInternalError):
            client.step(IDS, lr=0.01)
    for call in (lambda: client.step(IDS, lr=0.01), lambda: client.save_checkpoint("bad"), client.publish_weights):
        with pytest.raises(ConflictError, match=r"RuntimeError interrupted a call.*load a checkpoint"):
            call()
    client.load_checkpoint("good", with_optimizer=True)
    assert client.compute_loss(IDS) == expected
    assert client.step(IDS, lr=0.01).step == 1


def test_a_batch_over_the_memory_is_refused(client: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed by it, and smaller ones go on."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "forward_backward", failing(MemoryError()))
        with pytest.raises(ConflictError, match="more memory than there is") as caught:
            client.step(IDS, lr=0.01)
        assert caught.value.reason == "TRAINING_REFUSED"
    assert client.step(IDS, lr=0.01).step == 1


def test_settings_reach_the_trainer(training: Run, tiny_folder: Path) -> None:
    """float64, frozen tensors, no decay, and recomputed activations, which change no number."""
    settings = {"dtype": "float64", "frozen": ("*embed_tokens*",), "no_decay": ("*norm.weight",)}
    results = []
    for recompute in (False, True):
        with training(tiny_folder, recompute=recompute, **settings) as target, TrainingClient(target) as client:
            results.append([client.step(IDS, lr=0.01, weight_decay=0.1) for _ in range(2)])
            state = client.training_state()
            assert state.dtype == "float64"
            assert state.num_trainable_parameters < state.num_parameters
    assert results[0] == results[1]


async def test_a_slow_reader_of_metrics_skips_what_is_gone() -> None:
    """It never holds up the training, and goes on with the oldest that is kept."""
    log = MetricsLog(2)
    reader = log.follow(None, past_only=False)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    for step in range(1, 6):
        log.add(StepMetrics(step=step, loss=0.0, num_tokens=1, grad_norm=0.0, lr=0.0, tokens_per_s=1.0))
    assert (await waiting).step == 4
    assert (await anext(reader)).step == 5
    log.close()
    assert [metrics async for metrics in reader] == []
