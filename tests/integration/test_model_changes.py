"""Models, weights and adapters come and go over gRPC while the server runs."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from treadle_client import (
    AsyncClient,
    Client,
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.config import ServerConfig
from treadle_server.service import model_changes
from treadle_server.service.embedded import embedded_server

KNOBS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "token_ids": True}


@pytest.fixture
def root(tmp_path: Path, tiny_folder: Path, golden: Path) -> Path:
    """A folder that the server allows, with two checkpoints and an adapter; beside it one that it does not."""
    allowed = tmp_path / "allowed"
    shutil.copytree(tiny_folder, allowed / "first")
    shutil.copytree(tiny_folder, allowed / "second")
    shutil.copytree(golden / "adapters" / "llama_plain", allowed / "adapter")
    shutil.copytree(tiny_folder, tmp_path / "outside")
    file = allowed / "second" / "model.safetensors"
    rng = np.random.default_rng(1)
    tensors = {name: t + rng.normal(0, 0.1, t.shape).astype(t.dtype) for name, t in load_file(file).items()}
    write_safetensors(file, tensors)
    return allowed


@pytest.fixture
def serve(tiny_folder: Path) -> Callable[..., object]:
    """Serve the tiny model as `tiny` with some settings, and lend a client."""

    @contextmanager
    def serving(**settings: object) -> Iterator[Client]:
        config = ServerConfig(port=0, numerics="reproducible", **settings)
        with embedded_server([f"tiny={tiny_folder}"], config) as target, Client(target, timeout_s=30) as client:
            yield client

    return serving


@pytest.fixture
def client(serve: Callable[..., object], root: Path, plugin_dir: Path) -> Iterator[Client]:
    """A client of a server that allows the root, and gives requests of an unloading model five seconds."""
    with serve(model_roots=(root,), grace_s=5, plugin_dirs=(plugin_dir,)) as made:
        yield made


def tokens(client: Client, **knobs: object) -> tuple[int, ...]:
    """Return the tokens of a short greedy answer."""
    return client.generate([5, 90, 41], **{**KNOBS, **knobs}).choices[0].token_ids


def test_weights_are_updated(client: Client, root: Path) -> None:
    """The new version answers, and every message that tells a version tells it; the old one comes back as a third."""
    before = tokens(client)
    with client.stream([5, 90, 41], ignore_eos=True, max_tokens=100, token_ids=True) as stream:
        next(stream)
        assert client.update_weights(root / "second", label="run 7", expected_version=1) == 2
        assert [chunk.finish.weight_version for chunk in stream if chunk.finish] == [1]
    model = client.get_model()
    assert (model.weight_version, model.weight_label) == (2, "run 7")
    assert client.score([5, 90]).weight_version == 2
    assert client.trace([5, 90], what="logits").weight_version == 2
    assert client.generate([5], max_tokens=1).prompt_info.weight_version == 2
    assert tokens(client) != before
    assert client.update_weights(root / "first", model="tiny") == 3
    assert tokens(client) == before


def test_an_unexpected_version_is_a_conflict(client: Client, root: Path) -> None:
    """The error names both versions, and nothing changes."""
    with pytest.raises(ConflictError, match="version 1, not 4") as caught:
        client.update_weights(root / "second", expected_version=4)
    assert caught.value.reason == "VERSION_CONFLICT"
    assert client.get_model().weight_version == 1


def test_a_checkpoint_of_another_model_is_refused(client: Client, root: Path, golden: Path) -> None:
    """The error says what differs, and the old weights serve on."""
    shutil.copytree(golden / "models" / "gpt2", root / "gpt2")
    with pytest.raises(ConflictError, match="another architecture") as caught:
        client.update_weights(root / "gpt2")
    assert caught.value.reason == "CHECKPOINT_INVALID"
    assert client.get_model().weight_version == 1


def test_updates_at_once_wait_for_each_other(client: Client, root: Path) -> None:
    """Each of several updates gets a version of its own."""
    versions: list[int] = []
    paths = [root / "second", root / "first", root / "second"]
    threads = [threading.Thread(target=lambda p=path: versions.append(client.update_weights(p))) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == [2, 3, 4]


def test_adapters_come_and_go(client: Client, root: Path) -> None:
    """An adapter is loaded by name, used by request, listed, replaced and unloaded."""
    bare = tokens(client)
    adapter = client.load_adapter("cats", root / "adapter")
    assert (adapter.name, adapter.model, adapter.version) == ("cats", "tiny", 1)
    answer = client.generate([5, 90, 41], **KNOBS, adapter="cats")
    assert (answer.prompt_info.adapter, answer.prompt_info.adapter_version) == ("cats", 1)
    assert client.score([5, 90, 41], adapter="cats").adapter_version == 1
    assert client.score([5, 90, 41], adapter="cats").total_logprob != client.score([5, 90, 41]).total_logprob
    assert not np.array_equal(
        client.trace([5], what="logits", adapter="cats")["logits"], client.trace([5], what="logits")["logits"]
    )
    assert tokens(client) == bare
    assert client.load_adapter("cats", root / "adapter", model="tiny").version == 2
    assert [(entry.name, entry.version) for entry in client.list_adapters()] == [("cats", 2)]
    client.unload_adapter("cats")
    assert client.list_adapters(model="tiny") == ()
    with pytest.raises(InvalidArgumentError, match="loaded adapters: none"):
        tokens(client, adapter="cats")
    with pytest.raises(NotFoundError, match="no adapter 'cats'"):
        client.unload_adapter("cats")


def test_models_come_and_go(client: Client, root: Path) -> None:
    """A model is loaded beside others, serves, and goes; its name is then free again."""
    model = client.load_model(str(root / "second"), name="other")
    assert (model.name, model.weight_version) == ("other", 1)
    assert tokens(client, model="other") != tokens(client, model="tiny")
    with pytest.raises(ConflictError, match="'other' already"):
        client.load_model(str(root / "first"), name="other")
    client.unload_model("other")
    assert [model.name for model in client.list_models()] == ["tiny"]
    with pytest.raises(NotFoundError, match="known models: tiny"):
        tokens(client, model="other")
    assert client.load_model(str(root / "second")).name == "second"


def test_bundled_and_stored_models_need_no_root(serve: Callable[..., object]) -> None:
    """A name of the store or of the bundled models is loaded whatever the roots are; a path that looks like one not."""
    with serve() as client:
        assert client.load_model("cat-mouse").name == "cat-mouse"
        assert client.generate([1], model="cat-mouse", max_tokens=2).choices
        for source in ("nope", "", "~"):
            with pytest.raises(NotFoundError, match="cat-mouse"):
                client.load_model(source)
        with pytest.raises(InvalidArgumentError, match="absolute path"):
            client.load_model("../tiny")


def test_without_roots_no_folder_is_taken(serve: Callable[..., object], root: Path) -> None:
    """The error tells the option that would allow it."""
    with serve() as client:
        for call in (
            lambda: client.update_weights(root / "second"),
            lambda: client.load_model(str(root / "second")),
            lambda: client.load_adapter("a", root / "adapter"),
        ):
            with pytest.raises(PermissionDeniedError, match="--model-root"):
                call()


def test_folders_outside_the_roots_are_refused(client: Client, root: Path) -> None:
    """Neither dots nor links lead out of a root, be it the folder or a file in it; nothing tells what is there."""
    outside = root.parent / "outside"
    (root / "link").symlink_to(outside)
    shutil.copytree(outside, root / "linked-file")
    (root / "linked-file" / "model.safetensors").unlink()
    (root / "linked-file" / "model.safetensors").symlink_to(outside / "model.safetensors")
    denied = [outside, root / ".." / "outside", root / "link", root / "linked-file", outside / "absent", Path("/")]
    for path in denied:
        with pytest.raises(PermissionDeniedError, match="not under a folder"):
            client.update_weights(path)
    with pytest.raises(PermissionDeniedError):
        client.load_model(str(root / "link"), name="x")
    with pytest.raises(PermissionDeniedError):
        client.load_adapter("x", outside)
    (root / "inner").symlink_to(root / "second")
    assert client.update_weights(root / "inner") == 2


def test_wrong_paths_and_names_are_refused_by_field(
    client: Client, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Relative, empty and impossible paths, absent folders, and names that are none each get their own error.

    The log has no warning of them: their own lines say it.
    """
    for path in ("second", "", "a\0b", "/\0"):
        with pytest.raises(InvalidArgumentError, match="path: must be the absolute path"):
            client.update_weights(path)
    with pytest.raises(InvalidArgumentError, match="source: must be an absolute path of a folder, or a stored model"):
        client.load_model("./second", name="x")
    with pytest.raises(NotFoundError, match="there is no such folder"):
        client.update_weights(root / "absent")
    with pytest.raises(NotFoundError):
        client.load_adapter("a", root / "adapter" / "adapter_config.json")
    with pytest.raises(InvalidArgumentError, match="adapter: must be"):
        client.load_adapter("a b", root / "adapter")
    with pytest.raises(InvalidArgumentError, match="model: must be"):
        client.load_model(str(root / "second"), name="a b")
    for call in (client.unload_model, lambda name: client.update_weights(root / "second", model=name)):
        with pytest.raises(NotFoundError, match="known models: tiny"):
            call("nope")
    with pytest.raises(NotFoundError):
        client.unload_model("")
    assert not [record for record in caplog.records if record.name == model_changes.__name__]


def test_unloading_lets_requests_finish(client: Client) -> None:
    """Those under way end as they would have; new ones are refused at once; the call returns when all is freed."""
    slow = ("faulty", {"how": "sleep"})
    with client.stream([5, 90], model="tiny", ignore_eos=True, max_tokens=60, stages=[slow], token_ids=True) as stream:
        next(stream)
        thread = threading.Thread(target=client.unload_model, args=("tiny",))
        thread.start()
        time.sleep(0.3)
        refused = pytest.raises(UnavailableError, match="the model 'tiny' is being unloaded")
        with Client(client._connection.target, retries=0) as other, refused:
            tokens(other, model="tiny")
        finishes = [chunk.finish for chunk in stream if chunk.finish]
    thread.join()
    assert finishes[0].usage.num_generated_tokens == 60
    assert client.list_models() == ()
    with pytest.raises(NotFoundError):
        tokens(client)


def test_unloading_ends_requests_after_the_grace_period(serve: Callable[..., object], plugin_dir: Path) -> None:
    """What has not finished by then fails with UNAVAILABLE, and the memory is free."""
    with serve(grace_s=0.2, plugin_dirs=(plugin_dir,)) as client:
        slow = ("faulty", {"how": "sleep"})
        with client.stream([5, 90, 41], ignore_eos=True, max_tokens=110, stages=[slow], token_ids=True) as stream:
            next(stream)
            client.unload_model("tiny")
            with pytest.raises(UnavailableError, match="unloaded"):
                list(stream)
        assert client.get_load() == ()


@pytest.fixture
def slow_folder(root: Path) -> Path:
    """A checkpoint with a file that is read only once somebody writes it: its loading waits until then."""
    folder = root / "slow"
    shutil.copytree(root / "second", folder)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    return folder


def let_it_load(folder: Path) -> None:
    """Let the loading of a slow folder go on."""
    file = folder / "generation_config.json"
    with file.open("w") as pipe:
        file.unlink()  # whoever opens it again finds no file, which is allowed
        pipe.write("{}")


def test_the_server_serves_while_it_loads(client: Client, slow_folder: Path) -> None:
    """Generation and health go on beside loading; further changes of the model wait for their turn."""
    versions: list[int] = []
    threads = [
        threading.Thread(target=lambda p=path: versions.append(client.update_weights(p)))
        for path in (slow_folder, slow_folder.parent / "first")
    ]
    threads[0].start()
    time.sleep(0.2)
    threads[1].start()
    started = time.monotonic()
    client.wait_ready(timeout_s=1)
    assert client.generate([5], max_tokens=1).prompt_info.weight_version == 1
    assert time.monotonic() - started < 2
    assert versions == []
    let_it_load(slow_folder)
    for thread in threads:
        thread.join()
    assert versions == [2, 3]


def test_a_change_goes_on_when_its_caller_has_gone(client: Client, slow_folder: Path) -> None:
    """A load that outlives its deadline still ends in a served model."""
    with pytest.raises(DeadlineExceededError):
        client.load_model(str(slow_folder), name="late", timeout_s=0.3)
    let_it_load(slow_folder)
    deadline_s = time.monotonic() + 10
    while "late" not in [model.name for model in client.list_models()]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert tokens(client, model="late")


def test_a_replaced_folder_is_seen_only_on_update(client: Client, root: Path) -> None:
    """What is renamed over a served folder disturbs nothing until it is asked for."""
    client.load_model(str(root / "first"), name="first")
    before = tokens(client, model="first")
    (root / "first").rename(root / "old")
    (root / "second").rename(root / "first")
    assert tokens(client, model="first") == before
    assert client.update_weights(root / "first", model="first") == 2
    assert tokens(client, model="first") != before


async def test_the_asynchronous_client_changes_models_too(client: Client, root: Path) -> None:
    """Every verb has its twin."""
    async with AsyncClient(client._connection.target, timeout_s=30) as twin:
        assert (await twin.load_model(str(root / "second"), name="other")).name == "other"
        assert await twin.update_weights(root / "first", model="other", expected_version=1) == 2
        assert (await twin.load_adapter("cats", root / "adapter", model="other")).version == 1
        assert [entry.model for entry in await twin.list_adapters(model="other")] == ["other"]
        await twin.unload_adapter("cats", model="other")
        await twin.unload_model("other")
        assert [model.name for model in await twin.list_models()] == ["tiny"]
