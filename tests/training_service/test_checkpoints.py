"""Checkpoints by RPC: exact, complete or absent, and never outside their root."""

from __future__ import annotations

import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from treadle_client import ConflictError, InvalidArgumentError, TrainingClient, TreadleClientError

Run = Callable[..., AbstractContextManager[Any]]
BATCHES = [[[i, i + 1, (7 * i) % 40, 3]] for i in range(1, 11)]


def losses(client: TrainingClient, batches: list[Any]) -> list[float]:
    """Train on batches; return each loss, which tells the weights before it to the bit."""
    return [client.step(batch, lr=1e-2, weight_decay=0.1, grad_clip_norm=1.0).loss for batch in batches]


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_resuming_is_exact(training: Run, tiny_folder: Path, tmp_path: Path, optimizer: str) -> None:
    """Five steps, a checkpoint, and five steps in a new trainer are the bits of ten steps."""
    settings = {"optimizer": optimizer, "checkpoint_root": tmp_path}
    with training(tiny_folder, **settings) as target, TrainingClient(target, timeout_s=60) as client:
        losses(client, BATCHES[:5])
        client.save_checkpoint("half")
        expected = losses(client, BATCHES[5:])
        last = client.compute_loss(BATCHES[0])
        client.load_checkpoint("half", with_optimizer=True)
        assert losses(client, BATCHES[5:]) == expected
    with training(tiny_folder, resume="half", **settings) as target, TrainingClient(target, timeout_s=60) as client:
        assert client.training_state().step == 5
        assert losses(client, BATCHES[5:]) == expected
        assert client.compute_loss(BATCHES[0]) == last


def test_an_adapters_training_resumes_exactly(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Of an adapter alone, too."""
    settings = {"lora": {"rank": 2, "targets": ["q_proj", "up_proj"]}, "checkpoint_root": tmp_path}
    with training(tiny_folder, **settings) as target, TrainingClient(target, timeout_s=60) as client:
        state = client.training_state()
        assert state.lora_rank == 2
        assert 0 < state.num_trainable_parameters < state.num_parameters
        losses(client, BATCHES[:3])
        client.save_checkpoint("a")
        expected = losses(client, BATCHES[3:6])
    with training(tiny_folder, resume="a", **settings) as target, TrainingClient(target, timeout_s=60) as client:
        assert losses(client, BATCHES[3:6]) == expected


def test_gradients_that_wait_are_never_lost_in_a_checkpoint(client: TrainingClient) -> None:
    """A checkpoint holds none, so saving waits for the step."""
    client.forward_backward(BATCHES[0])
    with pytest.raises(ConflictError, match="gradients wait"):
        client.save_checkpoint("a")
    client.optim_step(lr=1e-2)
    assert client.save_checkpoint("a").step == 1


def test_an_adapter_is_no_model(training: Run, tiny_folder: Path, client: TrainingClient, tmp_path: Path) -> None:
    """Neither loads the other's checkpoint, nor an adapter one of another rank."""
    client.save_checkpoint("model")
    root = tmp_path / "checkpoints"
    for rank, wrong in ((2, ["model"]), (3, ["model", "rank-2"])):
        with (
            training(tiny_folder, checkpoint_root=root, lora={"rank": rank}) as target,
            TrainingClient(target, timeout_s=60) as adapting,
        ):
            for name in wrong:
                refuses(adapting, name)
            adapting.step(BATCHES[0], lr=1e-2)
            adapting.save_checkpoint(f"rank-{rank}")
    refuses(client, "rank-2")


def refuses(client: TrainingClient, name: str) -> None:
    """Check that a trainer loads no such checkpoint, with its optimizer or without."""
    for with_optimizer in (True, False):
        with pytest.raises(ConflictError, match=r".+") as caught:
            client.load_checkpoint(name, with_optimizer=with_optimizer)
        assert caught.value.reason == "CHECKPOINT_INVALID"


def test_weights_alone_begin_anew(client: TrainingClient) -> None:
    """Loading without the optimizer keeps the weights and forgets steps, moments and gradients that wait."""
    losses(client, BATCHES[:3])
    client.save_checkpoint("a")
    before = client.compute_loss(BATCHES[0])
    client.forward_backward(BATCHES[3])
    assert client.load_checkpoint("a", with_optimizer=False).step == 0
    assert client.compute_loss(BATCHES[0]) == before
    assert client.training_state().num_waiting_batches == 0
    assert client.step(BATCHES[3], lr=1e-2).step == 1


def test_checkpoints_are_listed_and_replaced(client: TrainingClient, tmp_path: Path) -> None:
    """By name, with their steps; one of the same name takes the place of the other."""
    client.save_checkpoint("b")
    client.save_checkpoint("a")
    losses(client, BATCHES[:2])
    saved = client.save_checkpoint("b")
    assert [(c.name, c.step) for c in client.training_state().checkpoints] == [("a", 0), ("b", 2)]
    assert client.training_state().checkpoints[1] == saved
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "a\\b", "/a", ".a", "a.partial", "a.previous", "a" * 101, "ä", "a b", "a\0"]
)
def test_names_never_reach_outside_the_root(client: TrainingClient, name: str) -> None:
    """What is no plain name is refused, for saving as for loading."""
    with pytest.raises(InvalidArgumentError, match="name: must be"):
        client.save_checkpoint(name)
    with pytest.raises(InvalidArgumentError, match="name: must be"):
        client.load_checkpoint(name, with_optimizer=True)


def test_a_root_that_somebody_deleted_has_no_checkpoints(client: TrainingClient, tmp_path: Path) -> None:
    """The state says so, loading is refused, and a save makes it anew."""
    shutil.rmtree(tmp_path / "checkpoints")
    assert client.training_state().checkpoints == ()
    with pytest.raises(ConflictError, match="no checkpoint 'gone'; saved ones: none"):
        client.load_checkpoint("gone", with_optimizer=True)
    client.save_checkpoint("new")
    assert [saved.name for saved in client.training_state().checkpoints] == ["new"]


def test_a_folder_of_somebody_elses_outlives_the_start(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Whatever it is called: only what a trainer had saved is cleaned up."""
    (tmp_path / "notes.previous").mkdir()
    (tmp_path / "notes.previous" / "notes.txt").write_text("mine")
    with training(tiny_folder, checkpoint_root=tmp_path):
        assert (tmp_path / "notes.previous" / "notes.txt").read_text() == "mine"


def test_a_link_is_no_checkpoint(client: TrainingClient, tmp_path: Path) -> None:
    """One in the root that points elsewhere is not followed."""
    client.save_checkpoint("a")
    (tmp_path / "checkpoints" / "a").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConflictError, match="no checkpoint 'a'"):
        client.load_checkpoint("a", with_optimizer=True)


def test_an_absent_checkpoint_names_those_there_are(client: TrainingClient) -> None:
    """And a trainer without a root says what it lacks."""
    client.save_checkpoint("known")
    with pytest.raises(ConflictError, match="no checkpoint 'other'; saved ones: known"):
        client.load_checkpoint("other", with_optimizer=True)


def test_a_trainer_without_a_root_keeps_none(training: Run, tiny_folder: Path) -> None:
    """Saving and loading are refused."""
    with training(tiny_folder) as target, TrainingClient(target, timeout_s=60) as client:
        with pytest.raises(ConflictError, match="--checkpoint-root"):
            client.save_checkpoint("a")
        assert client.training_state().checkpoints == ()


def test_a_checkpoint_of_another_model_changes_nothing(
    training: Run, golden: Path, client: TrainingClient, tmp_path: Path
) -> None:
    """Another model's, another optimizer's, and a broken one are refused; the training is as before."""
    root = tmp_path / "checkpoints"
    with (
        training(golden / "models" / "gpt2", checkpoint_root=root) as target,
        TrainingClient(target, timeout_s=60) as client_of_other,
    ):
        client_of_other.save_checkpoint("other")
    losses(client, BATCHES[:2])
    client.save_checkpoint("good")
    shutil.copytree(root / "good", root / "cut")
    (root / "cut" / "trainer_state.safetensors").write_bytes(b"cut short")
    shutil.copytree(root / "good", root / "answers")
    (root / "answers" / "trainer_answers.json").write_text('{"answers": [{"number": "x"}]}')
    before = client.compute_loss(BATCHES[0])
    for name, reason in (("other", "is another model"), ("cut", "trainer_state"), ("answers", "answers are broken")):
        with pytest.raises(ConflictError, match=reason) as caught:
            client.load_checkpoint(name, with_optimizer=True)
        assert caught.value.reason == "CHECKPOINT_INVALID"
    assert client.compute_loss(BATCHES[0]) == before
    assert client.training_state().step == 2
    assert client.step(BATCHES[2], lr=1e-2).step == 3


def test_another_optimizers_state_is_refused(
    training: Run, tiny_folder: Path, client: TrainingClient, tmp_path: Path
) -> None:
    """Its weights alone may be loaded."""
    losses(client, BATCHES[:2])
    client.save_checkpoint("a")
    settings = {"checkpoint_root": tmp_path / "checkpoints", "optimizer": "sgd"}
    with training(tiny_folder, **settings) as target, TrainingClient(target, timeout_s=60) as other:
        with pytest.raises(ConflictError, match="state of adamw, but this trainer's is sgd"):
            other.load_checkpoint("a", with_optimizer=True)
        other.load_checkpoint("a", with_optimizer=False)
        assert other.compute_loss(BATCHES[0]) == client.compute_loss(BATCHES[0])


@pytest.mark.skipif(sys.platform != "linux", reason="limits a running process")
def test_a_full_disk_loses_nothing(process: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A save that the disk does not take says so; the old checkpoint stays, the training goes on, later saves work."""
    with (
        process("trainer", tiny_folder, "--checkpoint-root", tmp_path) as (started, told),
        TrainingClient(told["address"], timeout_s=60) as client,
    ):
        client.step(BATCHES[0], lr=1e-2)
        client.save_checkpoint("a")
        client.step(BATCHES[1], lr=1e-2)
        unlimited = resource.prlimit(started.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(started.pid, resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
        with pytest.raises(ConflictError, match=r"cannot be written: .*File too large") as caught:
            client.save_checkpoint("a")
        assert caught.value.reason == "CHECKPOINT_NOT_WRITTEN"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert [c.step for c in client.training_state().checkpoints] == [1]
        assert client.step(BATCHES[2], lr=1e-2).step == 3
        resource.prlimit(started.pid, resource.RLIMIT_FSIZE, unlimited)
        assert client.save_checkpoint("a").step == 3


def test_a_trainer_killed_while_it_saves_comes_back(process: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """At any moment: the last complete checkpoint loads, and its weights are those of its step."""
    moments = random.Random(0)
    known: dict[int, float] = {}
    arguments: list[str | Path] = ["trainer", tiny_folder, "--checkpoint-root", tmp_path]
    for life in range(4):
        resume = ["--resume", "a"] if life else []
        with process(*arguments, *resume) as (started, told), TrainingClient(told["address"], retries=0) as client:
            step = client.training_state().step
            if life:
                assert client.compute_loss(BATCHES[0]).loss == known[step]
            for _ in range(2):
                client.step(BATCHES[step % 10], lr=1e-2)
                step += 1
                known[step] = client.compute_loss(BATCHES[0]).loss
                if life + step == 1:
                    client.save_checkpoint("a")
            saving = threading.Thread(target=save_until_killed, args=(client,))
            saving.start()
            time.sleep(moments.uniform(0, 0.1))
            started.kill()
            saving.join()
    with process(*arguments, "--resume", "a") as (_, told), TrainingClient(told["address"]) as client:
        assert client.compute_loss(BATCHES[0]).loss == known[client.training_state().step]
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def save_until_killed(client: TrainingClient) -> None:
    """Save again and again under one name."""
    with suppress(TreadleClientError):
        while True:
            client.save_checkpoint("a")
