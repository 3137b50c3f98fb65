"""Publishing into a live server: what it serves afterwards, and every way in which it may not take the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from treadle_client import (
    Client,
    ConflictError,
    PermissionDeniedError,
    TrainingClient,
    TreadleClientError,
    UnavailableError,
)
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

Run = Callable[..., AbstractContextManager[Any]]
IDS = [[1, 40, 41, 42, 43, 44, 45, 46]]
GREEDY: dict[str, Any] = {"temperature": 0, "token_ids": True, "ignore_eos": True}


@pytest.fixture
def served(tiny_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a server of the tiny model that takes weights from `tmp_path / "published"`."""
    config = ServerConfig(port=0, model_roots=(tmp_path / "published",), grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as address:
        yield address


@pytest.fixture
def publishing(training: Run, tiny_folder: Path, tmp_path: Path, served: str) -> Run:
    """Train a model that publishes to that server, or as keywords say; lends a client of the trainer."""

    @contextmanager
    def run(model: Path = tiny_folder, *, root: Path | None = None, **settings: Any) -> Iterator[TrainingClient]:
        target = {"address": served, "model": "tiny", **settings.pop("target", {})}
        folder = tmp_path / "published" if root is None else root
        with (
            training(model, publish_root=folder, target=target, **settings) as address,
            TrainingClient(address, timeout_s=60, retries=0) as client,
        ):
            yield client

    return run


def learn(client: TrainingClient, num_steps: int = 30) -> None:
    """Teach the model to continue its one row."""
    for _ in range(num_steps):
        client.step(IDS, lr=1e-2)


def test_published_weights_are_served(publishing: Run, served: str) -> None:
    """A stream under way ends on its version; the next request shows the new one, and what was learnt."""
    with publishing() as client, Client(served, timeout_s=60) as server:
        before = server.generate(IDS[0][:2], max_tokens=6, **GREEDY)
        learn(client)
        with server.stream([1, 2], max_tokens=100, **GREEDY) as stream:
            next(stream)
            done = client.publish_weights("first lesson")
            after = server.generate(IDS[0][:2], max_tokens=6, **GREEDY)
            list(stream)
        assert (done.model, done.weight_version, done.adapter, done.step) == ("tiny", 2, "", 30)
        assert stream.finishes[0].weight_version == before.choices[0].finish.weight_version == 1
        assert after.prompt_info.weight_version == after.choices[0].finish.weight_version == 2
        assert list(after.choices[0].token_ids) == IDS[0][2:]
        assert after.text != before.text
        assert server.get_model("tiny").weight_label == "first lesson"
        assert client.training_state().published == done


def test_an_adapter_is_published_as_one(publishing: Run, served: str) -> None:
    """The weights stay; requests that name the adapter show what was learnt, and its version counts up."""
    with publishing(lora={"rank": 8}, target={"adapter": "pupil"}) as client, Client(served, timeout_s=60) as server:
        learn(client, 60)
        done = client.publish_weights()
        assert (done.weight_version, done.adapter, done.adapter_version) == (1, "pupil", 1)
        answer = server.generate(IDS[0][:2], adapter="pupil", max_tokens=6, **GREEDY)
        assert list(answer.choices[0].token_ids) == IDS[0][2:]
        bare = server.generate(IDS[0][:2], max_tokens=6, **GREEDY)
        assert list(bare.choices[0].token_ids) != IDS[0][2:]
        assert client.publish_weights().adapter_version == 2


def test_the_last_two_are_kept(publishing: Run, tmp_path: Path) -> None:
    """Older folders are removed; so are those of a trainer that was there before."""
    for _ in range(2):
        with publishing() as client:
            for _ in range(3):
                client.step(IDS, lr=1e-3)
                client.publish_weights()
    assert len(names(tmp_path)) == 2
    assert all(name.startswith(("step-00000003-", "step-00000002-")) for name in names(tmp_path))


def test_what_a_killed_trainer_left_is_removed(publishing: Run, tmp_path: Path) -> None:
    """Weights are written beside their place, so no folder of a version's name is ever half written."""
    with publishing() as client:
        (tmp_path / "published" / "step-00000001-0123abcd.partial").mkdir(parents=True)
        client.publish_weights()
    assert [name for name in names(tmp_path) if name.endswith(".partial")] == []
    assert len(names(tmp_path)) == 1


def names(tmp_path: Path) -> list[str]:
    """Return what lies in the publish root."""
    root = tmp_path / "published"
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def test_a_repeated_publish_is_done_once(publishing: Run) -> None:
    """The same number gives the same version again."""
    with publishing() as client:
        first = client.publish_weights()
        client._next_number -= 1
        assert client.publish_weights() == first
        assert client.publish_weights().weight_version == first.weight_version + 1


def refused(client: TrainingClient, kind: type[TreadleClientError], reason: str, message: str, **keywords: Any) -> None:
    """Check that publishing is refused so, and that the training is as before and goes on."""
    before = client.compute_loss(IDS), client.training_state().next_sequence_number
    with pytest.raises(kind, match=message) as caught:
        client.publish_weights(**keywords)
    assert caught.value.reason == reason
    assert (client.compute_loss(IDS), client.training_state().next_sequence_number) == before
    assert client.training_state().published is None
    client.step(IDS, lr=1e-3)


def test_without_a_server_nothing_is_published(training: Run, tiny_folder: Path) -> None:
    """The trainer says how to name one."""
    with training(tiny_folder) as target, TrainingClient(target, timeout_s=60) as client:
        refused(client, ConflictError, "PUBLISH_REFUSED", "--server")


def test_weights_that_compute_no_numbers_are_not_published(publishing: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A huge rate leaves finite weights whose pass overflows: the server keeps what it serves."""
    with publishing() as client:
        client.step(IDS, lr=1e30)
        with pytest.raises(ConflictError, match="logits are not finite after step 1: nothing was published") as caught:
            client.publish_weights()
        assert caught.value.reason == "TRAINING_REFUSED"
        assert client.training_state().published is None
    assert not any((tmp_path / "published").glob("step-*"))


def test_an_absent_server_is_named(publishing: Run, tmp_path: Path) -> None:
    """Nothing listens there."""
    with publishing(target={"address": "127.0.0.1:1"}) as client:
        refused(client, UnavailableError, "PUBLISH_TARGET_UNAVAILABLE", "127.0.0.1:1 did not take")
    assert names(tmp_path) == []


def test_a_model_that_is_not_served_is_named(publishing: Run, tmp_path: Path) -> None:
    """The server's own words list those there are."""
    with publishing(target={"model": "other"}) as client:
        refused(client, ConflictError, "PUBLISH_REFUSED", "no model 'other'; known models: tiny")
    assert names(tmp_path) == []


def test_another_model_is_refused_before_anything_is_written(publishing: Run, golden: Path, tmp_path: Path) -> None:
    """What is served must be what is trained."""
    with publishing(golden / "models" / "gpt2") as client:
        refused(client, ConflictError, "PUBLISH_REFUSED", "serves 'tiny', a llama of .* this is a gpt2")
    assert names(tmp_path) == []


def test_another_version_is_refused(publishing: Run, tmp_path: Path) -> None:
    """When the caller expects one that is not served."""
    with publishing() as client:
        refused(client, ConflictError, "PUBLISH_REFUSED", "version 1, not 7", expected_version=7)
        assert client.publish_weights(expected_version=1).weight_version == 2
    assert len(names(tmp_path)) == 1


def test_a_folder_that_the_server_may_not_read_is_refused(publishing: Run, tmp_path: Path) -> None:
    """Outside its model roots; what was written is removed."""
    with publishing(root=tmp_path / "elsewhere") as client:
        refused(client, PermissionDeniedError, "PUBLISH_DENIED", "did not take the weights")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("token", "message"), [(None, "token"), ("wrong-token-of-nobody", "token"), ("u" * 32, "admin")]
)
def test_a_server_with_tokens_wants_an_administrators(
    training: Run, tiny_folder: Path, tmp_path: Path, token: str | None, message: str
) -> None:
    """Without one, with a wrong one and with a user's it is denied; with the right one it is done."""
    file = tmp_path / "tokens"
    file.write_text(f"user {'u' * 32}\nadmin {'a' * 32}\n")
    file.chmod(0o600)
    config = ServerConfig(port=0, model_roots=(tmp_path / "published",), grace_s=0, token_file=file)
    with ExitStack() as stack:
        address = stack.enter_context(embedded_server([f"tiny={tiny_folder}"], config))
        for given, denied in ((token, True), ("a" * 32, False)):
            target = {"address": address, "token": given}
            trainer = stack.enter_context(training(tiny_folder, publish_root=tmp_path / "published", target=target))
            client = stack.enter_context(TrainingClient(trainer, timeout_s=60))
            if denied:
                refused(client, PermissionDeniedError, "PUBLISH_DENIED", message)
            else:
                assert client.publish_weights().weight_version == 2


def test_a_server_that_speaks_tls_takes_weights(
    training: Run, tiny_folder: Path, tmp_path: Path, tls_files: dict[str, Path]
) -> None:
    """When the trainer trusts who signed its certificate; without TLS the server does not answer it."""
    config = ServerConfig(
        port=0,
        model_roots=(tmp_path / "published",),
        grace_s=0,
        tls_certificate=tls_files["certificate"],
        tls_key=tls_files["key"],
    )
    with ExitStack() as stack:
        address = stack.enter_context(embedded_server([f"tiny={tiny_folder}"], config))
        for tls, fits in (({}, False), ({"tls_ca": tls_files["certificate"]}, True)):
            target = {"address": address, **tls}
            trainer = stack.enter_context(training(tiny_folder, publish_root=tmp_path / "published", target=target))
            client = stack.enter_context(TrainingClient(trainer, timeout_s=60, retries=0))
            if fits:
                assert client.publish_weights().weight_version == 2
            else:
                refused(client, UnavailableError, "PUBLISH_TARGET_UNAVAILABLE", "did not take")


def test_a_full_disk_is_no_publication(publishing: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, nothing is left behind, and a later publication works."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with publishing() as client:
        with monkeypatch.context() as patch:
            patch.setattr("treadle_server.checkpoints.safetensors_io.safetensors.numpy.save_file", full)
            refused(client, ConflictError, "CHECKPOINT_NOT_WRITTEN", "No space left")
        assert names(tmp_path) == []
        assert client.publish_weights().weight_version == 2
