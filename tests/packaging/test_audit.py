"""Known faults in what treadle depends on, as pip-audit's database lists them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = (
    "treadle-server",
    "treadle-client",
    "treadle-protos",
    "treadle-plugin-api",
    "treadle-samplers",
    "treadle-kernels",
    "treadle-weights",
)


def installed_dependencies() -> dict[str, str]:
    """Return the version of everything that treadle brings with it, directly or not, its own parts aside."""
    found: dict[str, str] = {}
    waiting, seen = list(OURS), set(OURS)
    while waiting:
        name = waiting.pop()
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # of another system, or of an extra that is not installed
            continue
        needed = (Requirement(text) for text in requires(name) or ())
        new = {canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})} - seen
        seen |= new
        waiting += new
    return {name: found[name] for name in found if name not in OURS}


def audit(packages: dict[str, str], folder: Path) -> list[dict[str, object]]:
    """Return what pip-audit says of each package; skip the test where its database does not answer."""
    pinned = folder / "requirements.txt"
    pinned.write_text("".join(f"{name}=={number}\n" for name, number in sorted(packages.items())))
    command = [sys.executable, "-m", "pip_audit", "-r", str(pinned), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        answers: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        pytest.skip("the database of known faults did not answer in time")
    except ValueError:
        pytest.skip(f"the database of known faults does not answer: {done.stderr.strip()[-300:]}")
    known = [answer for answer in answers if "skip_reason" not in answer]
    if not known:
        pytest.skip(f"the database of known faults knows none of the packages: {answers[0]['skip_reason']}")
    return known


def test_dependencies_are_found() -> None:
    """The list to audit has what is needed directly and what that needs; none of it is ours."""
    found = installed_dependencies()
    assert {"grpcio", "numpy", "pydantic", "pydantic-core", "tokenizers"} <= found.keys()
    assert not any(name.startswith("treadle") for name in found)


@pytest.mark.network
def test_no_dependency_has_a_known_fault(tmp_path: Path) -> None:
    """No installed version of a dependency has a published vulnerability. Skipped where no database answers."""
    faults = [
        f"{a['name']} {a['version']}: {a['vulns']}" for a in audit(installed_dependencies(), tmp_path) if a["vulns"]
    ]
    assert not faults, "\n".join(faults)
