"""Installations in clean environments, from a clone under an awkward path that is deleted afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

# What a user of the plugin writes: the same request without the plugin's stage and with it.
CLIENT_SCRIPT = """
import json, sys
from treadle_client import Client

with Client(sys.argv[1]) as client:
    knobs = {"temperature": 0, "max_tokens": 1}
    free = client.generate("猫 追", **knobs)
    banned = client.generate("猫 追", **knobs, stages=[("lipogram", {"letters": free.text.strip()[0]})])
    stages = {plugin.distribution: plugin.stages for plugin in client.list_samplers().plugins}
print(json.dumps({"free": free.text, "banned": banned.text, "stages": stages}))
"""
# Every public name is there, and NumPy is not needed for any.
IMPORT_SCRIPT = """
import sys, treadle_client
missing = [name for name in treadle_client.__all__ if not hasattr(treadle_client, name)]
print(missing, "numpy" in sys.modules)
"""


@pytest.fixture(scope="module")
def client_alone(install, parts):
    """An environment in which the install command of the client's README was run."""
    (client,) = (part for part in parts if part.package == "treadle_client")
    return install("client", *client.install_paths())


@pytest.fixture(scope="module")
def umbrella_with_plugin(umbrella, template, tmp_path_factory: pytest.TempPathFactory):
    """The environment of a user who copied the template and installed it, and then deleted the copy."""
    copy = tmp_path_factory.mktemp("author") / "my sampler 字"
    shutil.copytree(template.path, copy, ignore=shutil.ignore_patterns("__pycache__"))
    umbrella.run("pip", "install", copy)
    shutil.rmtree(copy)
    return umbrella


@contextmanager
def serving(environment, model: str) -> Iterator[str]:
    """Run `treadle serve` on a free port; lend its address, then end it as an operator does."""
    command = [environment.program("treadle"), "serve", model, "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=environment.work, env=environment.variables(), stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
            process.wait(30)
    assert process.returncode == 0 or os.name == "nt"


def test_generate_streams_a_sentence(umbrella) -> None:
    """The smaller bundled model writes the rest of a three-word sentence, with the clone gone."""
    text = umbrella.run("treadle", "generate", "猫 追", "--model", "cat-mouse", "--temperature", "0", "--echo")
    assert text == "猫 追 老鼠\n"


def test_generate_needs_no_options(umbrella) -> None:
    """The first command of the README tells a story."""
    assert umbrella.run("treadle", "generate", "The cat").strip().endswith((".", "!", "?", '"'))


def test_tells_its_version(umbrella, parts) -> None:
    """`treadle --version` is the distributions' version."""
    assert umbrella.run("treadle", "--version").split() == ["treadle", parts[0].project["version"]]


def test_every_part_is_installed(umbrella, parts) -> None:
    """The umbrella brings each package, and what is installed fits together."""
    assert [part.package for part in parts if not umbrella.has(part.package)] == []
    umbrella.run("pip", "check")


def test_lists_the_built_in_samplers(umbrella) -> None:
    """`treadle plugins` shows the built-in stages, which came through their entry point."""
    plugins = json.loads(umbrella.run("treadle", "plugins", "--json"))
    built_in = {plugin["name"]: plugin for plugin in plugins if plugin["distribution"] == "treadle-samplers"}
    assert built_in["samplers"]["status"] == "active"
    assert {"greedy", "categorical", "temperature", "top_k", "top_p"} <= set(built_in["samplers"]["stages"])


def test_the_grammar_is_an_extra(umbrella) -> None:
    """Without llguidance the stage is listed with what to install, which is no fault, and naming it says the same."""
    plugins = json.loads(umbrella.run("treadle", "plugins", "--check", "--json"))
    (grammar,) = (plugin for plugin in plugins if plugin["name"] == "grammar")
    assert grammar["status"] == "not installed"
    assert "pip install 'treadle-samplers[grammar]'" in grammar["reason"]
    command = [umbrella.program("treadle"), "generate", "猫", "--strict-plugins", "--stage", 'grammar:{"regex": "a"}']
    done = subprocess.run(
        command, cwd=umbrella.work, env=umbrella.variables(), capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'treadle-samplers[grammar]'" in done.stderr


def test_the_client_needs_no_numpy(client_alone) -> None:
    """The client alone brings neither NumPy nor the server, and all its public names are there."""
    assert not client_alone.has("numpy")
    assert not client_alone.has("treadle_server")
    assert client_alone.run("python", "-c", IMPORT_SCRIPT).strip() == "[] False"


def test_the_template_plugin_changes_what_is_generated(umbrella_with_plugin, template, tmp_path: Path) -> None:
    """A third-party plugin is found by a real server, listed, and used by a real client's request."""
    script = tmp_path / "script.py"
    script.write_text(CLIENT_SCRIPT, encoding="utf-8")
    with serving(umbrella_with_plugin, "cat-mouse") as address:
        answer = json.loads(umbrella_with_plugin.run("python", script, address))
    assert answer["stages"][template.name] == ["lipogram"]
    assert answer["free"].strip() == "老鼠"
    assert answer["banned"].strip()
    assert "老" not in answer["banned"]


def test_a_client_alone_talks_to_the_server(umbrella, client_alone) -> None:
    """The client's own environment streams from a server in another."""
    code = "import sys, treadle_client as t; print(t.Client(sys.argv[1]).generate('猫 追', temperature=0).text)"
    with serving(umbrella, "cat-mouse") as address:
        assert client_alone.run("python", "-W", "error", "-c", code, address).strip() == "老鼠"
