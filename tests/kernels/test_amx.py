"""Products on the tiles of AMX, in a process of their own: on the CPU's where it has some, else on emulated ones.

That process runs `amx_cases`, and every test of products again, but those of other formats. Here each is a test.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = [FOLDER / "amx_cases.py", FOLDER / "test_products.py"]
CASES = [(file.stem, name) for file in FILES for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)]
CHANGED = ("TREADLE_KERNELS_AMX", "TREADLE_KERNELS_PORTABLE", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
TIMEOUT_S = 280


@pytest.fixture(scope="module")
def features() -> dict[str, bool]:
    """What LLVM says of this CPU, which has AMX or can emulate it beside AVX-512; skips elsewhere."""
    import llvmlite.binding as llvm

    found = llvm.get_host_cpu_features()
    if sys.platform != "linux" or platform.machine() != "x86_64" or not found.get("avx512f"):
        pytest.skip("AMX is of x86-64, emulated on Linux beside AVX-512 alone")
    return found


def has_own(features: Mapping[str, bool]) -> bool:
    """Whether the CPU has tiles; skips where it has some and may not use them."""
    from treadle_kernels.machine import may_use_tiles

    if features.get("amx-tile") and not may_use_tiles():
        pytest.skip("the CPU has AMX, but the system does not permit it")
    return features.get("amx-tile", False) and features.get("amx-bf16", False)


def environment(features: Mapping[str, bool], cache: Path) -> dict[str, str]:
    """Return the environment of a process that has tiles, own ones or emulated, with the folder of compiled code."""
    import llvmlite.binding as llvm

    kept = {name: value for name, value in os.environ.items() if name not in CHANGED}
    kept["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    if has_own(features):
        return kept
    wanted = llvm.targets.FeatureMap(features | {"amx-tile": True, "amx-bf16": True})
    kept |= {"NUMBA_CPU_NAME": llvm.get_host_cpu_name(), "NUMBA_CPU_FEATURES": wanted.flatten()}
    return kept | {"TREADLE_KERNELS_CACHE": str(cache), "TREADLE_KERNELS_THREADS": "1"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the code that is compiled for emulated tiles."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def outcomes(features: Mapping[str, bool], cache: Path) -> Mapping[tuple[str, str], list[str]]:
    """By file and name what is wrong with each test on tiles."""
    report = cache / "report.xml"
    emulate = [] if has_own(features) else ["--noconftest", "-p", "amx_emulator"]
    options = ["-q", "-p", "no:cacheprovider", "-k", "not float32", f"--junitxml={report}", *emulate]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, FILES)], cwd=FOLDER.parents[1], capture_output=True,
        env=environment(features, cache), text=True, timeout=TIMEOUT_S, check=False
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        key = case.attrib["classname"].rpartition(".")[2], case.attrib["name"].partition("[")[0]
        found[key] += [one.text or one.tag for one in case if one.tag in ("failure", "error", "skipped")]
    return found


@pytest.mark.parametrize(("file", "name"), CASES)
def test_products_hold_on_tiles(outcomes, file, name):
    """What the test of that name states is true of kernels on tiles."""
    assert (file, name) in outcomes
    assert not outcomes[file, name], "\n".join(outcomes[file, name])


ONE_PRODUCT = """
import amx_emulator
amx_emulator.install()
from test_products import draw, multiply
multiply("bfloat16", draw("bfloat16", 20, 40), draw("float32", 3, 40))
print(amx_emulator.STATE["count"][0] > 0, amx_emulator.STATE["config"].any())
"""


@pytest.mark.parametrize(("given", "used"), [("0", False), ("1", True)])
def test_tiles_can_be_refused_and_are_given_back(features, cache, given, used):
    """With TREADLE_KERNELS_AMX=0 no instruction of AMX is executed; else a product leaves no tile to its thread."""
    if has_own(features):
        pytest.skip("instructions are counted where they are emulated")
    own = environment(features, cache) | {"TREADLE_KERNELS_AMX": given}
    done = subprocess.run([sys.executable, "-c", ONE_PRODUCT], env=own, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(used), "False"], done.stderr


@pytest.mark.parametrize("lacking", [None, "amx-tile", "amx-bf16", "avx512f", "permission"])
def test_tiles_are_used_where_all_is_there(kernels, monkeypatch, lacking):
    """The CPU must have both parts of AMX, and AVX-512 beside it, and the system must permit it."""
    import llvmlite.binding as llvm
    from treadle_kernels import machine

    found = llvm.targets.FeatureMap(dict.fromkeys(["avx512f", "amx-tile", "amx-bf16"], True))
    found |= {} if lacking is None else {lacking: False}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: found)
    monkeypatch.setattr(machine, "may_use_tiles", lambda: lacking != "permission")
    monkeypatch.delenv(machine.AMX, raising=False)
    monkeypatch.delenv(machine.PORTABLE, raising=False)
    assert machine.Machine.of_host().tiles == (lacking is None)
    for refused in ("0", "off", "No", "false"):
        monkeypatch.setenv(machine.AMX, refused)
        assert not machine.Machine.of_host().tiles


def test_a_process_asks_for_tiles_once(kernels):
    """The system's answer is yes or no, and there is no error where it knows no such thing."""
    from treadle_kernels.machine import may_use_tiles

    assert may_use_tiles() in (True, False)
    assert may_use_tiles.cache_info().currsize == 1
