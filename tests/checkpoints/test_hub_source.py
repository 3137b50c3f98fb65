"""`hf:` sources, against a hub of our own on loopback that speaks the few requests that are needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from safetensors.numpy import load_file, save_file
from treadle_server.checkpoints import hub_source
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.store import ModelStore
from treadle_server.errors import CheckpointError, ImportSourceError, UnsupportedModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_let_me_in"


@dataclass
class Hub:
    """Repositories by name, each a dictionary of files; what was asked for is remembered."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    licence: str | None = "mit"
    fetched: list[str] = field(default_factory=list)

    def listing(self, name: str) -> dict[str, Any]:
        """What the API says of a repository."""
        files = [{"rfilename": path, "size": len(content)} for path, content in self.repositories[name].items()]
        card = {"license": self.licence} if self.licence else None
        return {"id": name, "sha": COMMIT, "siblings": files, "cardData": card, "tags": [], "private": False}


class Handler(BaseHTTPRequestHandler):
    """The requests of `huggingface_hub`: a repository's listing, and its files."""

    hub: Hub

    def do_GET(self) -> None:
        """Answer in full."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers only."""
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        """Stay silent."""

    def _answer(self, *, body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        revision = (parts[5] if len(parts) > 5 else None) if is_api else parts[3]
        if refusal := self._refusal(name, revision):
            self._send(b"", body=False, status=refusal[0], headers={"X-Error-Code": refusal[1]})
        elif is_api:
            self._send(json.dumps(self.hub.listing(name)).encode(), body=True)
        else:
            self._file(name, "/".join(parts[4:]), body=body)

    def _refusal(self, name: str, revision: str | None) -> tuple[int, str] | None:
        if name not in self.hub.repositories:
            return 401, "RepoNotFound"
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 403, "GatedRepo"
        return None if revision in (None, "main", "v1", COMMIT) else (404, "RevisionNotFound")

    def _file(self, name: str, path: str, *, body: bool) -> None:
        content = self.hub.repositories[name][path]
        if body:
            self.hub.fetched.append(path)
        digest = hashlib.sha256(content).hexdigest()
        self._send(content, body=body, headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def _send(
        self, content: bytes, *, body: bool, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running hub that HF_ENDPOINT names, and no token."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """An empty store."""
    return ModelStore(tmp_path / "home")


@pytest.fixture
def tiny(hub: Hub, tiny_folder: Path) -> dict[str, bytes]:
    """The files of the tiny folder as `someone/Tiny-Model`, with much beside them that is not needed."""
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "original/model.safetensors": b"x", "model.py": b"raise SystemExit"}
    files |= {"consolidated.safetensors": b"x", "onnx/model.onnx": b"x", "tokenizer.py": b"raise SystemExit"}
    files |= {"generation_config.json": b"{}", "chat_template.jinja": b"{{ messages }}", "LICENSE": b"MIT"}
    hub.repositories["someone/Tiny-Model"] = files
    return files


def names(folder: Path) -> set[str]:
    """The files of a stored model."""
    return {path.name for path in folder.iterdir()}


def test_only_the_needed_files_are_fetched(hub: Hub, tiny: dict[str, bytes], store: ModelStore) -> None:
    """Settings, tokenizer, template, licence and weights arrive; code, pickles and other formats stay there."""
    model = pull("hf:someone/Tiny-Model", store)
    assert (model.name, model.source, model.licence) == ("tiny-model", "hf:someone/Tiny-Model", "mit")
    expected = {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
        "model.safetensors",
    }
    assert names(model.folder) == expected | {"treadle.json"}
    assert set(hub.fetched) == expected
    assert (model.folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]


def test_only_the_shards_of_the_index_are_fetched(
    hub: Hub, tiny: dict[str, bytes], store: ModelStore, tmp_path: Path
) -> None:
    """An index says which files are the model."""
    (tmp_path / "whole").write_bytes(tiny.pop("model.safetensors"))
    tensors = load_file(tmp_path / "whole")
    weight_map = {name: f"model-{1 + ('layers.1' in name)}.safetensors" for name in tensors}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
        tiny[shard] = (tmp_path / shard).read_bytes()
    tiny["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    tiny["model-9.safetensors"] = b"left over"
    folder = pull("hf:someone/Tiny-Model", store).folder
    assert {name for name in names(folder) if name.endswith(".safetensors")} == set(weight_map.values())


@pytest.mark.parametrize("weight_map", [{"a": "../x.safetensors"}, {"a": "gone.safetensors"}, {}, None])
def test_an_index_that_names_no_file_of_the_hub_is_refused(
    tiny: dict[str, bytes], store: ModelStore, weight_map: Any
) -> None:
    """Shards that are not there, or lead elsewhere, are an error."""
    tiny["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    with pytest.raises(CheckpointError, match=r"index\.json names no shards, or missing"):
        pull("hf:someone/Tiny-Model", store)
    assert store.list() == []


def test_a_revision_can_be_named(tiny: dict[str, bytes], store: ModelStore) -> None:
    """After @, a branch, tag or commit."""
    assert pull(f"hf:someone/Tiny-Model@{COMMIT}", store, name="one").name == "one"
    assert pull("hf:someone/Tiny-Model@v1", store).source == "hf:someone/Tiny-Model@v1"
    with pytest.raises(ImportSourceError, match="hf:someone/Tiny-Model has no revision 'nine'"):
        pull("hf:someone/Tiny-Model@nine", store)


def test_gguf_file_of_a_repository(hub: Hub, store: ModelStore, write_gguf: Callable[..., Path]) -> None:
    """One GGUF file is fetched and converted, also from a folder; the card's licence counts where the file has none."""
    content = write_gguf(metadata={"general.license": None}).read_bytes()
    hub.repositories["someone/gguf"] = {"q4/Tiny.Q4_0.gguf": content, "Other.gguf": b"x"}
    model = pull("hf:someone/gguf/q4/Tiny.Q4_0.gguf", store)
    assert (model.name, model.licence) == ("tiny", "mit")
    assert hub.fetched == ["q4/Tiny.Q4_0.gguf"]


def test_a_damaged_gguf_file_is_named_by_its_repository(hub: Hub, store: ModelStore) -> None:
    """Not by the scratch folder that it was fetched into."""
    hub.repositories["someone/gguf"] = {"q4/Tiny.gguf": b"GGUF" + bytes(40)}
    with pytest.raises(CheckpointError, match=r"^hf:someone/gguf/q4/Tiny\.gguf: ") as refusal:
        pull("hf:someone/gguf/q4/Tiny.gguf", store)
    assert "incoming" not in str(refusal.value)


@pytest.mark.parametrize("source", ["hf:someone/gguf", "hf:someone/gguf/Nine.gguf"])
def test_gguf_files_are_named_where_one_must_be_chosen(hub: Hub, store: ModelStore, source: str) -> None:
    """A repository with GGUF files only, or without the one asked for, says what it has."""
    hub.repositories["someone/gguf"] = {"A.gguf": b"", "sub/B.gguf": b""}
    with pytest.raises(ImportSourceError, match=r"hf:someone/gguf/A\.gguf, hf:someone/gguf/sub/B\.gguf"):
        pull(source, store)


def test_progress_reaches_the_end(tiny: dict[str, bytes], store: ModelStore) -> None:
    """Settings, weights and checking each report, and every total is reached."""
    last: dict[str, tuple[int, int]] = {}
    pull("hf:someone/Tiny-Model", store, progress=lambda what, done, total: last.update({what: (done, total)}))
    assert list(last) == [
        "downloading settings of someone/Tiny-Model", "downloading someone/Tiny-Model", "checking tiny-model",
    ]  # fmt: skip
    assert last["downloading someone/Tiny-Model"] == (len(tiny["model.safetensors"]),) * 2
    assert all(done == total for done, total in last.values())


def test_a_model_that_could_not_be_served_is_refused_before_its_weights_are_fetched(
    hub: Hub, tiny: dict[str, bytes], store: ModelStore
) -> None:
    """What config.json can tell is told at once."""
    tiny["config.json"] = json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}).encode()
    with pytest.raises(UnsupportedModelError, match=r"quantised \(fp8\)"):
        pull("hf:someone/Tiny-Model", store)
    assert "model.safetensors" not in hub.fetched


def test_files_in_folders_are_left_there(hub: Hub, tiny: dict[str, bytes], store: ModelStore) -> None:
    """Patterns are for the files beside config.json: `*` does not reach into folders, of settings or of weights."""
    inside = (
        "configs/x.json",
        "tokenizer/tokenizer.json",
        "config.d/a.json",
        "LICENSES/mit.txt",
        "model/a.safetensors",
    )
    tiny |= dict.fromkeys(inside, b"{}")
    folder = pull("hf:someone/Tiny-Model", store).folder
    assert not set(inside) & set(hub.fetched)
    assert all(path.is_file() for path in folder.iterdir())


def test_weights_in_a_folder_are_not_the_model(hub: Hub, tiny: dict[str, bytes], store: ModelStore) -> None:
    """A repository with safetensors in folders only has none that would be found."""
    tiny["model_fp16/part.safetensors"] = tiny.pop("model.safetensors")
    with pytest.raises(ImportSourceError, match=r"holds no model\.safetensors"):
        pull("hf:someone/Tiny-Model", store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.json": None}, r"hf:someone/Tiny-Model holds no tokenizer\.json"),
        ({"config.json": None}, r"^hf:someone/Tiny-Model: has no config\.json"),
        ({"config.json": b'{"model_type": "unheard_of"}'}, r"^hf:someone/Tiny-Model: model_type 'unheard_of'"),
        ({"config.json": b'{"model_type": "llama"}'}, r"^hf:someone/Tiny-Model/config\.json: \w+ is missing"),
        ({"config.json": b"{"}, r"^hf:someone/Tiny-Model/config\.json: not valid JSON"),
    ],
)
def test_refusals_come_before_the_weights_and_name_the_repository(
    hub: Hub, tiny: dict[str, bytes], store: ModelStore, changes: dict[str, bytes | None], message: str
) -> None:
    """Not the folder it was fetched into, which is gone by then."""
    for name, content in changes.items():
        tiny.pop(name)
        if content is not None:
            tiny[name] = content
    with pytest.raises((CheckpointError, ImportSourceError), match=message) as refusal:
        pull("hf:someone/Tiny-Model@v1", store)
    assert "incoming" not in str(refusal.value)
    assert "model.safetensors" not in hub.fetched


def test_a_damaged_file_of_a_hub_is_named_by_its_repository(tiny: dict[str, bytes], store: ModelStore) -> None:
    """Found after the fetch, and named all the same by where it came from."""
    tiny["model.safetensors"] = b"nothing"
    with pytest.raises(CheckpointError, match=r"^hf:someone/Tiny-Model/model\.safetensors: "):
        pull("hf:someone/Tiny-Model", store)


def test_without_safetensors_nothing_is_fetched(hub: Hub, tiny: dict[str, bytes], store: ModelStore) -> None:
    """Pickled weights are not fetched, and the error says why."""
    del tiny["model.safetensors"]
    with pytest.raises(ImportSourceError, match=r"holds no model\.safetensors.*can run code"):
        pull("hf:someone/Tiny-Model", store)
    assert hub.fetched == []


def test_a_missing_repository_is_an_error(hub: Hub, store: ModelStore) -> None:
    """The error says that it may be private."""
    with pytest.raises(ImportSourceError, match=r"hf:some/body does not exist, or is private; .* HF_TOKEN"):
        pull("hf:some/body", store)


def test_gated_models_need_a_token(
    hub: Hub, tiny: dict[str, bytes], store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token the terms are named; with HF_TOKEN the model comes."""
    hub.gated.add("someone/Tiny-Model")
    with pytest.raises(ImportSourceError, match=r"is gated: accept its terms .* HF_TOKEN"):
        pull("hf:someone/Tiny-Model", store)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull("hf:someone/Tiny-Model", store).name == "tiny-model"


def test_a_hub_that_cannot_be_reached_is_an_error(store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository and the reason are named."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ImportSourceError, match=r"hf:a/b cannot be fetched: \w+"):
        pull("hf:a/b", store)


def test_offline_mode_is_named(store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is respected; the library reads it when it is imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ImportSourceError, match="hf:a/b cannot be fetched while HF_HUB_OFFLINE is set"):
        pull("hf:a/b", store)


@pytest.mark.parametrize("source", ["", "name", "a/b/c", "a/b/x.bin", "a b/c", "a/b@", "/a/b", "a//b"])
def test_other_spellings_are_refused(store: ModelStore, source: str) -> None:
    """A source is OWNER/NAME, with a GGUF file or without."""
    with pytest.raises(ImportSourceError, match=r"hf:OWNER/NAME\[@REVISION\]"):
        pull(f"hf:{source}", store)


def test_too_large_a_model_is_refused(
    tiny: dict[str, bytes], store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated sizes are compared with the free space before anything is written."""
    monkeypatch.setattr(hub_source.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ImportSourceError, match=r"needs \d+ bytes in .*, 10 are free"):
        pull("hf:someone/Tiny-Model", store)
