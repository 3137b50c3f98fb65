"""What is in each distribution's wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest


class Wheel:
    """A built wheel: its files, by the name they get when installed."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}

    @property
    def package_files(self) -> set[str]:
        """Names of the files that are no metadata."""
        return {name for name in self.files if ".dist-info/" not in name}

    def metadata(self) -> Message:
        """Return the wheel's metadata."""
        (name,) = (name for name in self.files if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(self.files[name])


def build(folder: Path, target: Path) -> Wheel:
    """Build the wheel of the distribution in a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return Wheel(path)


@pytest.fixture(scope="session")
def wheel(part, fresh_clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel of each distribution."""
    return build(fresh_clone / part.folder, tmp_path_factory.mktemp("wheel"))


def test_holds_the_package_and_nothing_else(part, wheel: Wheel, fresh_clone: Path) -> None:
    """A wheel's files are those of the package's folder: modules and data, no tests and nothing stray."""
    source = fresh_clone / part.folder / "src"
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert wheel.package_files == expected
    assert {name for name in expected if "test_" in name or name.endswith((".pyc", ".orig", ".log"))} == set()


def test_is_typed(part, wheel: Wheel) -> None:
    """A wheel tells type checkers that its annotations count."""
    assert f"{part.package}/py.typed" in wheel.files


def test_carries_license_and_readme(part, wheel: Wheel) -> None:
    """The license text is in the wheel, and the README is its description."""
    metadata = wheel.metadata()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.files)
    readme = (part.path / "README.md").read_text(encoding="utf-8")
    assert metadata.get_payload(decode=True) == readme.encode()


def test_names_no_path_of_the_machine(wheel: Wheel, fresh_clone: Path, root: Path) -> None:
    """Nothing in a wheel tells where it was built."""
    paths = [str(path).encode() for path in (root, fresh_clone, Path.home()) if path != Path(path.anchor)]
    assert [name for name, data in wheel.files.items() if any(path in data for path in paths)] == []


def test_holds_the_data_files(fresh_clone: Path, tmp_path: Path) -> None:
    """The proto files, the bundled models and their manifests are package data; the tools that made them are not."""
    protos = build(fresh_clone / "protos", tmp_path / "protos")
    assert "treadle_protos/v1/generation.proto" in protos.files
    weights = build(fresh_clone / "weights", tmp_path / "weights")
    for model in ("cat-mouse", "stories"):
        names = {Path(name).name for name in weights.files if name.startswith(f"treadle_weights/{model}/")}
        assert names >= {"config.json", "manifest.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert not [name for name in weights.files if "train_stories" in name or name.startswith("stories/")]
    assert sum(map(len, weights.files.values())) < 10e6


def test_offers_the_entry_points(fresh_clone: Path, tmp_path: Path) -> None:
    """The server brings the `treadle` command, the samplers register as any plugin does."""
    server = build(fresh_clone / "server", tmp_path / "server")
    assert "treadle = treadle_server.cli:main" in entry_points(server)
    samplers = build(fresh_clone / "plugins" / "samplers", tmp_path / "samplers")
    assert entry_points(samplers).startswith("[treadle]")


def entry_points(wheel: Wheel) -> str:
    """Return the text of a wheel's entry points."""
    (name,) = (name for name in wheel.files if name.endswith(".dist-info/entry_points.txt"))
    return wheel.files[name].decode()
