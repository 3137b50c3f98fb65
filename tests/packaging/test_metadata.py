"""What the project files say agrees with each other, with the tools' configuration and with the READMEs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

LOCK_FILES = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml", "package-lock.json"}
REGISTRY = re.compile(rb"(?:index-url|find-links)\W+\w+://|https?://[^\s\"'<>)]*(?:pypi|pythonhosted|/simple\b)")
THIS_FILE = Path(__file__).name


def umbrella_tables(root: Path) -> dict[str, Any]:
    """Everything in the root's pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def path_dependencies(part, parts) -> set[str]:
    """Folders of the distributions that one needs, its own and those of its extras included."""
    by_name = {other.name: other for other in parts}
    extras = part.project.get("optional-dependencies", {}).values()
    needed = [*part.project["dependencies"], *(name for extra in extras for name in extra)]
    own = [by_name[name] for name in needed if name in by_name]
    return {part.folder}.union(*(path_dependencies(other, parts) for other in own))


def test_versions_agree(root: Path, parts) -> None:
    """Every distribution has the umbrella's version."""
    versions = {part.folder: part.project["version"] for part in parts}
    assert set(versions.values()) == {umbrella_tables(root)["project"]["version"]}, versions


def test_the_umbrella_brings_every_part(root: Path, parts) -> None:
    """The umbrella depends on each distribution, by its path in the checkout, and on nothing else."""
    expected = [f"{part.name} @ {{root:uri}}/{part.folder}" for part in parts]
    assert sorted(umbrella_tables(root)["project"]["dependencies"]) == sorted(expected)


def test_developers_get_every_part(root: Path, parts) -> None:
    """requirements-dev.txt installs each distribution editable, whatever extras it takes."""
    lines = (root / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    editable = {line.partition("[")[0] for line in lines if line.startswith("-e")}
    assert editable == {f"-e ./{part.folder}" for part in parts}


def test_the_readme_installs_it_with_what_it_needs(part, parts) -> None:
    """Each README has one install command, with the distribution and its path dependencies and no more."""
    paths = part.install_paths()
    assert {path.removeprefix("./") for path in paths} == path_dependencies(part, parts)
    assert len(paths) == len(set(paths))


def test_nothing_can_be_uploaded(root: Path, part) -> None:
    """Every distribution carries the classifier that makes registries refuse it."""
    for project in (umbrella_tables(root)["project"], part.project):
        assert "Private :: Do Not Upload" in project["classifiers"]


def test_python_3_11_is_the_oldest_everywhere(root: Path, parts, template) -> None:
    """Metadata, linter and type checker speak of the same oldest Python."""
    tables = umbrella_tables(root)
    projects = [tables["project"], template.project, *(part.project for part in parts)]
    assert {project["requires-python"] for project in projects} == {">=3.11"}
    assert tables["tool"]["ruff"]["target-version"] == "py311"
    assert tables["tool"]["mypy"]["python_version"] == "3.11"


def test_the_license_is_the_same_everywhere(root: Path, part) -> None:
    """Each distribution holds the repository's license text and names it."""
    assert (part.path / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert part.project["license"] == umbrella_tables(root)["project"]["license"] == "Apache-2.0"


def test_ci_runs_the_documented_command(root: Path) -> None:
    """.ci/run runs exactly the test command of the README."""
    command = "pip install -r requirements-dev.txt && pytest"
    for path in (".ci/run", "README.md"):
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        assert command in (line.strip() for line in lines), f"{path} lacks the line {command}"


def test_no_lock_file_and_no_registry_host(fresh_clone: Path) -> None:
    """The tree says nothing of where packages come from: that is the user's own pip configuration."""
    files = [path for path in fresh_clone.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.name in LOCK_FILES] == []
    named = [path for path in files if path.name != THIS_FILE and REGISTRY.search(path.read_bytes())]
    assert named == []
