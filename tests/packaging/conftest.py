"""Distributions as users meet them: a copy of the checkout, virtual environments, and wheels made from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The package of each distribution, by its folder.
PACKAGES = {
    "protos": "treadle_protos",
    "plugins/api": "treadle_plugin_api",
    "plugins/samplers": "treadle_samplers",
    "clients/python": "treadle_client",
    "weights": "treadle_weights",
    "server": "treadle_server",
    "plugins/kernels": "treadle_kernels",
}
# A path that breaks whatever forgets to quote or to decode.
CLONE_NAME = "treadle 猫 clone"


@dataclass(frozen=True, slots=True)
class Part:
    """One distribution of the repository."""

    folder: str
    package: str

    @property
    def path(self) -> Path:
        """Its folder in the checkout."""
        return ROOT / self.folder

    @property
    def source(self) -> Path:
        """The folder of its package."""
        return self.path / "src" / self.package

    @property
    def tables(self) -> dict[str, Any]:
        """Everything in its pyproject.toml."""
        return tomllib.loads((self.path / "pyproject.toml").read_text(encoding="utf-8"))

    @property
    def project(self) -> dict[str, Any]:
        """Its metadata."""
        project: dict[str, Any] = self.tables["project"]
        return project

    @property
    def name(self) -> str:
        """The name that it is installed by."""
        return str(self.project["name"])

    def install_paths(self) -> list[str]:
        """Return the paths in the one `pip install` command of its README."""
        text = (self.path / "README.md").read_text(encoding="utf-8")
        (command,) = re.findall(r"`pip install (\./[^`]+)`", text)
        return str(command).split()


PARTS = [Part(folder, package) for folder, package in PACKAGES.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, and how to run its programs away from every checkout."""

    folder: Path
    work: Path

    def program(self, name: str) -> Path:
        """Return the path of one of its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / name

    def variables(self) -> dict[str, str]:
        """Return this process's variables without what would let an import reach the checkout."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**kept, "PYTHONIOENCODING": "utf-8"}

    def run(self, program: str, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Run one of its programs; return the stdout, or fail with all that it said."""
        done = subprocess.run(
            [self.program(program), *arguments],
            cwd=cwd or self.work,
            env=self.variables(),
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def has(self, module: str) -> bool:
        """Whether a module can be found there."""
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
        return self.run("python", "-c", code).strip() == "True"


Install = Callable[..., Environment]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def parts() -> list[Part]:
    """Every distribution that the umbrella brings."""
    return PARTS


@pytest.fixture(scope="session", params=PARTS, ids=lambda part: part.folder)
def part(request: pytest.FixtureRequest) -> Part:
    """Each distribution that the umbrella brings."""
    chosen: Part = request.param
    return chosen


@pytest.fixture(scope="session")
def template() -> Part:
    """The plugin that authors copy."""
    return Part("plugins/template", "treadle_lipogram")


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip when the package registry cannot be reached, unless that is forbidden."""
    target = tmp_path_factory.mktemp("registry")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "0", "--no-deps", "--dest", target]
    done = subprocess.run([*command, "hatchling"], capture_output=True, text=True, check=False)
    if done.returncode:
        forbidden = os.environ.get("TREADLE_REQUIRE_NETWORK")
        (pytest.fail if forbidden else pytest.skip)(f"no package registry: {done.stderr[-300:]}")


@pytest.fixture(scope="session")
def fresh_clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of what git tracks, as a new user has it, under an awkward path."""
    patterns = (line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split())
    target = tmp_path_factory.mktemp("home") / CLONE_NAME
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", *patterns))
    yield target
    shutil.rmtree(target)


@pytest.fixture(scope="session")
def install(registry: None, fresh_clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Make a function that installs paths of a clone into a new environment and deletes the clone."""

    def install_from_clone(name: str, *paths: str) -> Environment:
        folder = tmp_path_factory.mktemp(name)
        clone = Path(shutil.copytree(fresh_clone, folder / CLONE_NAME))
        environment = Environment(folder=folder / "venv", work=folder / "work")
        environment.work.mkdir()
        venv.create(environment.folder, with_pip=True)
        environment.run("pip", "install", *paths, cwd=clone)
        shutil.rmtree(clone)
        return environment

    return install_from_clone


@pytest.fixture(scope="session")
def umbrella(install: Install) -> Environment:
    """The environment of a new user: `pip install .`, and the clone deleted."""
    return install("umbrella", ".")
