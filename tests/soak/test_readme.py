"""The tables of README.md and the tests that they name."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
NUM_REPORTS = 51


def test_every_report_has_a_test() -> None:
    """Each row of the reports names tests that exist."""
    rows = [line for line in README.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == [*range(1, NUM_REPORTS + 1)]
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert re.search(rf"def {name}\(", (TESTS / path).read_text(encoding="utf-8")), (path, name)


def test_every_proof_is_in_the_table() -> None:
    """Each module of this folder is described, and each command of a figure runs one of them."""
    modules = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert modules == set(re.findall(r"^\| `(test_\w+\.py)` \|", README, re.MULTILINE))
    assert set(re.findall(r"pytest -m soak tests/soak/(test_\w+\.py)", README)) == modules
