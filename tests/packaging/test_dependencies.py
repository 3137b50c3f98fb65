"""What the code imports and what the project files declare are the same."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Several distributions share the packages `google` and `opentelemetry`. Longer names first.
SHARED = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
}
# Found through an entry point of the group `treadle`, so never imported.
PLUGINS = {"treadle-samplers"}


def imported_modules(source: Path) -> Iterator[str]:
    """Full names of the modules that the files under a folder import, at any depth of the code."""
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module


def distribution_of(module: str, installed: Mapping[str, list[str]]) -> str | None:
    """Name of the distribution that a module comes from; None for the standard library's."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if top.startswith("treadle_"):  # installed editable, ours leave no record of their modules
        return canonicalize_name(top)
    shared = next((name for prefix, name in SHARED.items() if module.startswith(prefix)), None)
    names = installed.get(top, [])
    return shared or (canonicalize_name(names[0]) if names else f"unknown distribution of {module}")


def imported_distributions(part) -> set[str]:
    """Names of the distributions, itself apart, that a distribution's code imports."""
    installed = packages_distributions()
    found = {distribution_of(module, installed) for module in imported_modules(part.source)}
    return {name for name in found if name is not None} - {part.name}


def declared_distributions(part) -> set[str]:
    """Names of the distributions that a distribution declares, in its extras too."""
    extras = part.project.get("optional-dependencies", {}).values()
    lines = [*part.project["dependencies"], *(line for extra in extras for line in extra)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_imports_are_declared(part) -> None:
    """Every import from another distribution is a declared dependency."""
    assert imported_distributions(part) - declared_distributions(part) == set()


def test_declarations_are_imported(part) -> None:
    """Every declared dependency is imported somewhere."""
    assert declared_distributions(part) - imported_distributions(part) - PLUGINS == set()


def test_the_template_declares_what_it_imports(template) -> None:
    """The plugin that authors copy has exact dependencies too."""
    assert imported_distributions(template) == declared_distributions(template)


def test_third_party_dependencies_have_lower_bounds(part) -> None:
    """Each third-party dependency has a lower bound and no upper one."""
    requirements = [Requirement(line) for line in part.project["dependencies"]]
    foreign = [requirement for requirement in requirements if not requirement.name.startswith("treadle-")]
    assert {requirement.name for requirement in foreign if not str(requirement.specifier).startswith(">=")} == set()
    assert [str(requirement) for requirement in foreign if len(requirement.specifier) != 1] == []


def test_one_dependency_has_one_bound(parts) -> None:
    """Distributions that need the same third-party package agree on its bound."""
    bounds: dict[str, set[str]] = {}
    for part in parts:
        for requirement in map(Requirement, part.project["dependencies"]):
            bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


@pytest.mark.parametrize("source", ["import torch", "def f():\n    from torch.nn import Linear"])
def test_the_search_sees_every_import(tmp_path: Path, source: str) -> None:
    """Imports inside functions count, and so do those of submodules."""
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert {name.partition(".")[0] for name in imported_modules(tmp_path)} == {"torch"}
