"""`treadle new-plugin` and `treadle plugins --check`: from nothing to a plugin that passes its tests, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from treadle_server.errors import PluginError
from treadle_server.plugins.new_plugin import FILES, write_plugin

TEMPLATE = Path(__file__).parents[2] / "plugins" / "template"
TREADLE = [sys.executable, "-m", "treadle_server.cli"]
# What a package index is found by: none, on an address where nothing listens.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "https_proxy": "http://127.0.0.1:9"}


def run(*command: str | Path, status: int = 0, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command without a network; return its stdout."""
    variables = {**os.environ, **OFFLINE, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that `treadle new-plugin` writes, in a folder that it has to make."""
    directory = tmp_path_factory.mktemp("authors") / "my plugins 字"
    said = json.loads(run(*TREADLE, "new-plugin", "night_owl", "--directory", directory, "--json"))
    assert said == {"name": "night_owl", "folder": str(directory / "treadle-night-owl")}
    return Path(said["folder"])


def test_the_template_is_what_the_command_writes(tmp_path: Path):
    """What readers of the repository see and what authors get are the same files."""
    run(*TREADLE, "new-plugin", "lipogram", "--directory", tmp_path)
    folder = tmp_path / "treadle-lipogram"
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert written == set(map(Path, FILES.values()))
    for path in written:
        assert (folder / path).read_text(encoding="utf-8") == (TEMPLATE / path).read_text(encoding="utf-8")


def test_nothing_is_left_of_the_template(project: Path):
    """Every name is the author's."""
    files = [path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) == len(FILES)
    assert not [path for path in files if "lipogram" in (str(path.name) + path.read_text(encoding="utf-8")).lower()]


def test_its_tests_pass_offline(project: Path):
    """The author's first `pytest` is green, before anything is installed."""
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", cwd=project)
    assert "7 passed" in said


def test_it_installs_offline_and_is_found(project: Path, tmp_path: Path):
    """Once installed it is a plugin of treadle that passes the check, and its stage can be named."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    run(*pip, project)
    found = json.loads(run(*TREADLE, "plugins", "--check", "--json", env={"PYTHONPATH": str(tmp_path)}))
    (mine,) = (plugin for plugin in found if plugin["name"] == "night_owl")
    assert (mine["distribution"], mine["status"], mine["stages"]) == ("treadle-night-owl", "passed", ["night_owl"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Bad", "lower-case"),
        ("a-b", "lower-case"),
        ("../a", "lower-case"),
        ("", "lower-case"),
        ("a" * 65, "64 at most"),
        ("client", "package treadle_client"),
        ("none", "class would be called None"),
        ("stage", "class would be called Stage"),
        ("taken", "a stage of that name already"),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, name: str, reason: str):
    """The reason is told and nothing is written."""
    with pytest.raises(PluginError, match=reason):
        write_plugin(name, tmp_path, taken={"taken"})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path):
    """What is there is not touched."""
    (tmp_path / "treadle-mine").mkdir()
    with pytest.raises(PluginError, match="is there already"):
        write_plugin("mine", tmp_path)
    assert list((tmp_path / "treadle-mine").iterdir()) == []


def test_the_command_knows_the_built_in_names(tmp_path: Path):
    """A plugin that could only fail beside the built-in one is not written."""
    run(*TREADLE, "new-plugin", "top_k", "--directory", tmp_path, status=1)
    assert list(tmp_path.iterdir()) == []


UNSOUND = '''
from treadle_plugin_api import Stage, hookimpl

class Unsound(Stage):
    """Make every logit NaN."""

    name = "unsound"
    kind = "mask"

    def apply(self, logits, context, state=None):
        return logits * float("nan")

@hookimpl
def treadle_register_stages(register):
    register(Unsound)
'''


def test_check_tells_what_is_wrong(tmp_path: Path):
    """A plugin that loads but breaks the contract fails the check, with the rule; without --check it is active."""
    (tmp_path / "unsound.py").write_text(UNSOUND, encoding="utf-8")
    options = ("--plugin-dir", tmp_path, "--json")
    found = {p["name"]: p for p in json.loads(run(*TREADLE, "plugins", "--check", *options, status=1))}
    assert found["unsound"]["status"] == "failed"
    assert "returned NaN" in found["unsound"]["reason"]
    assert found["samplers"]["status"] == "active"  # treadle's own tests have checked it
    listed = {p["name"]: p for p in json.loads(run(*TREADLE, "plugins", *options))}
    assert listed["unsound"]["status"] == "active"


def test_check_fails_on_a_plugin_that_does_not_load(tmp_path: Path):
    """An import error is a reason like any other."""
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere", encoding="utf-8")
    assert "no_such_module_anywhere" in run(*TREADLE, "plugins", "--check", "--plugin-dir", tmp_path, status=1)


def test_check_is_of_this_machine():
    """A server's plugins cannot be checked from outside."""
    run(*TREADLE, "plugins", "--check", "--target", "127.0.0.1:9", status=2)
