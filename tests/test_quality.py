"""The gates that are no tests of behaviour: lint, types, layers, and generated code that is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    "protos/src",
    "plugins/api/src",
    "plugins/samplers/src",
    "plugins/kernels/src",
    "plugins/template/src",
    "server/src",
    "clients/python/src",
    "weights/src",
]


def run(*command: str) -> None:
    """Run a tool in the repository's root and show what it says when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def test_ruff_finds_nothing() -> None:
    """Every file follows the lint rules."""
    run(sys.executable, "-m", "ruff", "check", ".")


def test_mypy_strict_finds_nothing() -> None:
    """Every distribution passes mypy in strict mode."""
    run(sys.executable, "-m", "mypy", *SOURCES)


def test_layers_point_down_only() -> None:
    """The import contracts hold."""
    lint_imports = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run(sys.executable, "-c", lint_imports)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the pinned generator has no build for this Python")
@pytest.mark.network
def test_generated_code_is_current() -> None:
    """The checked-in protobuf code is what the pinned generator makes of the proto files."""
    run(sys.executable, "protos/generate.py", "--check")
