"""Writes the project of a new plugin: a distribution with one stage, and tests that pass."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Container
from importlib import resources
from pathlib import Path

from treadle_plugin_api.contract import NAME_PATTERN

from treadle_server.errors import PluginError

# The files here, by their names in a project. Here they have others, as none of them is a module of this package.
FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "readme.md.in": "README.md",
    "package.py.in": "src/treadle_lipogram/__init__.py",
    "py.typed.in": "src/treadle_lipogram/py.typed",
    "conftest.py.in": "tests/conftest.py",
    "tests.py.in": "tests/test_lipogram.py",
}


def write_plugin(name: str, directory: Path, taken: Container[str] = ()) -> Path:
    """Write the project of a stage called `name` to a new folder under `directory`, and return the folder.

    Raises:
        PluginError: the name cannot be used, as it is `taken` or for another reason, or the folder is there already;
            nothing is written then.
    """
    if problem := "there is a stage of that name already" if name in taken else _name_problem(name):
        raise PluginError(f"a plugin cannot be called {name!r:.80}: {problem}")
    folder = directory / f"treadle-{name.replace('_', '-')}"
    if folder.exists():
        raise PluginError(f"{folder} is there already; choose another name or another --directory")
    texts = {_renamed(path, name): _renamed(_text(file), name) for file, path in FILES.items()}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8", newline="\n")
    return folder


def _text(file: str) -> str:
    return resources.files(__name__).joinpath(file).read_text(encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    """The project's text with the names that a stage called `name` needs in place of the lipogram's."""
    text = text.replace("treadle-lipogram", f"treadle-{name.replace('_', '-')}")
    return text.replace("Lipogram", _class_name(name)).replace("lipogram", name)


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _name_problem(name: str) -> str:
    """Why a name cannot be used; empty if it can."""
    if not NAME_PATTERN.fullmatch(name):
        return "a stage's name is a lower-case letter, then lower-case letters, digits and underscores, 64 at most"
    if importlib.util.find_spec(f"treadle_{name}") is not None:
        return f"there is a package treadle_{name} already"
    cls = _class_name(name)
    if keyword.iskeyword(cls) or re.search(rf"\b{cls}\b", _text("package.py.in").replace("Lipogram", "")):
        return f"its class would be called {cls}, which the file uses for something else"
    return ""
