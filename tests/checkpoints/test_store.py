"""The model store holds whole models or none, whatever happens while one is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from treadle_server.checkpoints import store as store_module
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.store import MANIFEST_FILE, ModelStore
from treadle_server.errors import CheckpointError, ImportSourceError, ModelNotFoundError


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """An empty store."""
    return ModelStore(tmp_path / "home")


def incoming(store: ModelStore) -> list[str]:
    """What is left of installs."""
    folder = store.root / "incoming"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_root_is_treadle_home_or_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TREADLE_HOME decides, and without it the user's cache folder."""
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    assert ModelStore().root == tmp_path
    monkeypatch.delenv("TREADLE_HOME")
    assert ModelStore().root.name == "treadle"


def test_an_empty_store_lists_nothing_and_makes_nothing(store: ModelStore) -> None:
    """Looking into a store that is not there leaves no folder behind."""
    assert store.list() == []
    assert not store.root.exists()


def test_manifest_describes_the_model(store: ModelStore, tiny_folder: Path) -> None:
    """treadle.json holds source, licence, counts and every file's digest, and `list` returns it."""
    model = pull(str(tiny_folder), store, name="tiny")
    assert store.list() == [model]
    assert (model.name, model.source, model.licence) == ("tiny", str(tiny_folder), "mit")
    assert (model.manifest.tensor_dtype, model.num_bytes) == (
        "F32",
        sum(p.stat().st_size for p in model.folder.iterdir() if p.name != MANIFEST_FILE),
    )
    weights = (tiny_folder / "model.safetensors").read_bytes()
    assert model.manifest.sha256["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert model.manifest.sha256.keys() == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert 4 * model.manifest.num_parameters == pytest.approx(len(weights), rel=0.1)


def test_names_resolve_whatever_their_case(store: ModelStore, tiny_folder: Path) -> None:
    """A stored name is found in any case; a path to a folder is returned as it is."""
    folder = pull(str(tiny_folder), store, name="Tiny-1").folder
    assert store.resolve("tiny-1") == store.resolve("TINY-1") == folder
    assert store.resolve(str(tiny_folder)) == tiny_folder


def test_bundled_models_resolve_after_stored_ones(
    store: ModelStore, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundled model is found by name, unless the store has one of the same name."""
    import treadle_weights

    bundled = tmp_path / "bundled"
    (bundled / "mouse").mkdir(parents=True)
    (bundled / "mouse" / "manifest.json").write_text("{}")
    monkeypatch.setattr(treadle_weights, "_root", lambda: bundled)
    assert store.resolve("Mouse") == bundled / "mouse"
    assert store.names() == ("mouse",)
    stored = pull(str(tiny_folder), store, name="mouse")
    assert store.resolve("mouse") == stored.folder


def test_the_server_runs_without_bundled_models(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the treadle_weights package there are no bundled names."""
    monkeypatch.setitem(sys.modules, "treadle_weights", None)
    assert store.names() == ()


@pytest.mark.parametrize("name", ["nothing", "", "no/such/path", "~nobody/x", "x" * 5000, "a\0b"])
def test_unknown_names_list_the_known_ones(store: ModelStore, tiny_folder: Path, name: str) -> None:
    """A name without a model is an error that says which names have one."""
    pull(str(tiny_folder), store, name="tiny")
    with pytest.raises(ModelNotFoundError, match=r"known models: .*tiny"):
        store.resolve(name)


def test_a_path_that_is_no_model_says_why(store: ModelStore, tmp_path: Path) -> None:
    """An existing folder without config.json is not taken for an unknown name."""
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        store.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\\b", ".hidden", "a..b", "naïve", "x" * 97])
def test_unsafe_names_are_refused(store: ModelStore, tiny_folder: Path, name: str) -> None:
    """A name that could leave the store's folder, or that some systems cannot have, is refused with its value."""
    with pytest.raises(ImportSourceError, match="model name: must be") as caught:
        pull(str(tiny_folder), store, name=name)
    assert repr(name) in str(caught.value)


def test_folders_without_a_true_manifest_are_not_models(store: ModelStore, tiny_folder: Path) -> None:
    """A broken manifest, or one copied under another name, does not count."""
    model = pull(str(tiny_folder), store, name="tiny")
    shutil.copytree(model.folder, model.folder.with_name("copy"))
    (model.folder / MANIFEST_FILE).write_text("{}")
    assert store.list() == []


def test_replacing_keeps_open_files_readable(store: ModelStore, tiny_folder: Path) -> None:
    """Whoever has the old model's files open reads on; the name leads to the new one."""
    old = pull(str(tiny_folder), store, name="tiny")
    with (old.folder / "README.md").open("rb") as file:
        (tiny_folder / "README.md").write_text("new")
        pull(str(tiny_folder), store, name="tiny")
        assert b"A card" in file.read()
    assert (store.resolve("tiny") / "README.md").read_text() == "new"
    assert incoming(store) == []


def test_a_failed_install_leaves_the_old_model_and_no_trace(store: ModelStore, tiny_folder: Path) -> None:
    """An error half way changes nothing."""
    pull(str(tiny_folder), store, name="tiny")
    (tiny_folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        pull(str(tiny_folder), store, name="tiny")
    assert len(store.list()) == 1
    assert incoming(store) == []


def test_a_killed_install_counts_for_nothing_and_is_cleaned_up(store: ModelStore, tiny_folder: Path) -> None:
    """After SIGKILL in the last stretch there is no model; the next install removes what was left."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from treadle_server.checkpoints.pull import pull\n"
        "from treadle_server.checkpoints.store import ModelStore\n"
        "def kill(what, done, total):\n"
        "    if what.startswith('checking') and done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pull(sys.argv[1], ModelStore(Path(sys.argv[2])), name='tiny', progress=kill)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tiny_folder), str(store.root)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert store.list() == []
    assert incoming(store) != []
    pull(str(tiny_folder), store, name="other")
    assert [model.name for model in store.list()] == ["other"]
    assert incoming(store) == []


def test_a_model_moved_aside_by_a_killed_install_is_put_back(store: ModelStore, tiny_folder: Path) -> None:
    """An install that died between its two renames costs nothing: the next one restores the old model."""
    model = pull(str(tiny_folder), store, name="tiny")
    dead = store.root / "incoming" / "dead"
    dead.mkdir()
    model.folder.rename(dead / "retired")
    assert store.list() == []
    pull(str(tiny_folder), store, name="other")
    assert [found.name for found in store.list()] == ["other", "tiny"]


def test_running_installs_are_not_swept(store: ModelStore, tiny_folder: Path) -> None:
    """A scratch folder in use stays while another install begins and ends."""
    with store.scratch() as scratch:
        (scratch / "half").touch()
        pull(str(tiny_folder), store, name="tiny")
        assert (scratch / "half").exists()
    assert incoming(store) == []


def test_concurrent_installs_of_one_name_leave_one_whole_model(store: ModelStore, tiny_folder: Path) -> None:
    """Four installs at once all succeed, and the model that stays matches its manifest."""
    with ThreadPoolExecutor(4) as pool:
        installs = [pool.submit(pull, str(tiny_folder), store, name="tiny") for _ in range(4)]
    assert {install.result().name for install in installs} == {"tiny"}
    (model,) = store.list()
    for name, digest in model.manifest.sha256.items():
        assert hashlib.sha256((model.folder / name).read_bytes()).hexdigest() == digest
    assert incoming(store) == []


def test_files_and_folders_are_flushed_before_the_rename(
    store: ModelStore, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and both folders reach the disk, the model's own before it gets its name."""
    flushed: list[str] = []
    flush = store_module._flush
    monkeypatch.setattr(store_module, "_flush", lambda path: (flushed.append(path.name), flush(path)))
    pull(str(tiny_folder), store, name="tiny")
    assert sorted(flushed[:-2]) == sorted(
        ["config.json", "model.safetensors", "tokenizer.json", "README.md", MANIFEST_FILE]
    )
    assert flushed[-2:] == ["model", "models"]


def test_the_store_folder_may_have_spaces_and_any_letters(tmp_path: Path, tiny_folder: Path) -> None:
    """A root such as `a b/模型` works."""
    store = ModelStore(tmp_path / "a b" / "模型")
    assert os.fspath(pull(str(tiny_folder), store, name="tiny").folder).startswith(os.fspath(store.root))


def test_folders_inside_a_model_are_no_files_of_it(store: ModelStore, tiny_folder: Path) -> None:
    """A folder that an installer left beside the files is neither hashed nor counted."""
    with store.scratch() as scratch:
        folder = scratch / "model"
        shutil.copytree(tiny_folder, folder)
        (folder / "configs").mkdir()
        (folder / "configs" / "x.json").write_text("{}")
        model = store.add("tiny", folder, source="here", licence="mit")
    assert "configs" not in model.manifest.sha256
