"""Whole models trained on the compiled backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_plugin_api.backend import Array, Batch
from treadle_server import LoraConfig, Trainer
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.errors import ConfigError, TrainingError
from treadle_server.model.trainable import TrainableDecoder

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
MODELS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7], [1, 8, 2, 8, 1]]
TOLERANCE = 1e-4  # of the largest number of a tensor


def gradients(decoder: TrainableDecoder) -> dict[str, Array]:
    """Return all gradients of logits that are weighed at random."""
    rng, vocab = np.random.default_rng(1), decoder.config.vocab_size
    saved: dict[str, Array] = {}
    hidden = decoder.forward_saving(Batch.of([rng.integers(0, vocab, length) for length in (29, 1, 13)]), saved)
    dlogits = rng.standard_normal(decoder.head(hidden).shape).astype(np.float32)
    of_head = {name: np.zeros_like(decoder.parameters[name]) for name in decoder.head_parameters()}
    dhidden = decoder.head_backward(hidden, dlogits, of_head)
    return {f"head {name}": one for name, one in of_head.items()} | decoder.backward(saved, dhidden)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_numpys(training, model: str) -> None:
    """Of every family, whatever of it is compiled."""
    with load_checkpoint(GOLDEN / model) as checkpoint:
        decoders = [TrainableDecoder(checkpoint.config, checkpoint.params, backend=one) for one in (training, None)]
    made, expected = map(gradients, decoders)
    # A bias of keys moves all scores of a row alike: where nothing turns them, its gradient is rounding and no more.
    least = 1e-2 * max(float(np.abs(one).max()) for one in expected.values())
    assert made.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(made[name] - gradient).max() <= TOLERANCE * max(least, np.abs(gradient).max()), name


@pytest.fixture
def trainers(training, tmp_path: Path) -> Iterator[Any]:
    """Loads a model on the compiled backend."""
    return lambda folder=GOLDEN / "llama_plain", **settings: Trainer.load(folder, backend="kernels", **settings)


def train(trainer: Trainer, num_steps: int) -> None:
    """Take steps on batches that differ."""
    for number in range(num_steps):
        trainer.forward_backward([[(one + trainer.step) % 90 for one in row] for row in IDS[number % 2 :]])
        trainer.optim_step(lr=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


def same(one: Trainer, other: Trainer) -> bool:
    """Tell whether all parameters have the same bits."""
    theirs = other.parameters()
    return all(np.array_equal(array, theirs[name]) for name, array in one.parameters().items())


def test_ten_steps_are_five_and_five(trainers: Any, tmp_path: Path) -> None:
    """Saved and loaded in between, to the bit."""
    whole, first = trainers(), trainers()
    train(whole, 10)
    train(first, 5)
    first.save(tmp_path / "half")
    second = trainers(tmp_path / "half")
    second.load_state(tmp_path / "half")
    train(second, 5)
    assert second.step == 10
    assert not same(first, second)
    # Batches go by their number since the start of `train`: five is odd, so they are told apart by it.
    again = trainers()
    train(again, 5)
    train(again, 5)
    assert same(again, second)


def test_steps_are_near_numpys(trainers: Any) -> None:
    """Five of them, of a model and of an adapter."""
    for settings in ({}, {"lora": LoraConfig(rank=3, alpha=6)}):
        one, other = trainers(**settings), Trainer.load(GOLDEN / "llama_plain", backend="numpy", **settings)
        for trainer in (one, other):
            train(trainer, 5)
        theirs = other.parameters()
        for name, array in one.parameters().items():
            assert np.abs(array - theirs[name]).max() < 1e-3, name


def test_layers_that_run_again_have_the_same_bits(trainers: Any) -> None:
    """Less memory, the same steps."""
    kept, recomputed = trainers(), trainers(recompute=True)
    for trainer in (kept, recomputed):
        train(trainer, 3)
    assert same(kept, recomputed)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_steps_on_so_many_threads_are_reproducible(
    trainers: Any, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A long batch goes to all of them; twice the same has the same bits."""
    from treadle_server.training import parallel_pass

    monkeypatch.setattr(parallel_pass, "MIN_TOKENS", 4)
    pair = trainers(), trainers()
    for trainer in pair:
        trainer._threads.number = threads
        train(trainer, 3)
    assert same(*pair)


def test_optimizers_have_the_same_bits_on_any_number_of_threads(trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of parameters do not depend on each other."""
    from treadle_server.training import stepping

    monkeypatch.setattr(stepping, "PIECE", 100)
    one, other = trainers(), trainers()
    other._threads.number = 3
    for trainer in (one, other):
        train(trainer, 2)  # too few tokens for more than one part
    assert same(one, other)


def test_a_loss_that_is_not_finite_is_refused(trainers: Any) -> None:
    """What compiled code makes of a NaN reaches the check."""
    trainer = trainers()
    trainer._trained.arrays["layers.0.mlp.up.weight"][0, 0] = np.nan
    with pytest.raises(TrainingError, match="the loss is nan: nothing was changed"):
        trainer.forward_backward(IDS)


def test_backends_by_name(training) -> None:
    """`auto` compiles what is float32; float64 is NumPy's."""
    names = {
        (backend, dtype): Trainer.load(GOLDEN / "llama_plain", backend=backend, dtype=dtype)._decoder.backend.name
        for backend, dtype in itertools.product(("auto", "numpy"), ("float32", "float64"))
    }
    assert names.pop(("auto", "float32")) == "kernels"
    assert set(names.values()) == {"numpy"}
    with pytest.raises(
        ConfigError, match="no compute backend 'kernels' that trains in float64; available: auto, numpy"
    ):
        Trainer.load(GOLDEN / "llama_plain", backend="kernels", dtype="float64")


def test_code_is_compiled_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And checked there; what fails is said, and nothing is marked as there."""
    from treadle_kernels import plugin, warm_up

    commands: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return type("Done", (), {"returncode": 1, "stderr": "off by 3"})

    monkeypatch.setattr(warm_up, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(warm_up.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="compiling kernels failed with status 1: off by 3"):
        plugin.make_training("float32")
    assert commands[0][1:] == ["-P", "-m", "treadle_kernels.training_warm_up", warm_up.WITH_PARENT]
    assert not list(tmp_path.iterdir())
