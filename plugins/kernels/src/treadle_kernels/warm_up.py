"""Compiling ahead: everything, once, in a process of its own, whose results are compared with NumPy's.

So no thread that serves waits for a compiler, and a fault of compiled code on some machine ends that process and no
server.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from treadle_plugin_api.backend import QUANTISED_BITS, Batch, Weight
from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
    RotaryConfig,
)
from treadle_plugin_api.drawing import draw

from treadle_kernels.compiled import cache_folder

_LOG = logging.getLogger(__name__)

MARK = "checked"
TIMEOUT_S = 600
WITH_PARENT = "--with-parent"
# As a part of the largest logit; a wrong kernel is off by all of it. Beside int8 and int4 activations are rounded.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.1

# Sizes that no vector divides.
SMALL = DecoderConfig(
    model_type="llama",
    vocab_size=131,
    dim=42,
    num_layers=2,
    context_length=64,
    norm=NormConfig(kind="rms", eps=1e-5),
    positions=PositionsConfig(kind="rotary", rotary=RotaryConfig()),
    attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10, scale=10**-0.5),
    mlp=MlpConfig(hidden_dim=51, activation="silu", gated=True),
)


def ensure_compiled(module: str = "treadle_kernels.warm_up", mark: str = MARK) -> None:
    """Return once the cache has every kernel; the first time on a machine that takes a while, and a log line says so.

    The module is what a process of its own runs, the mark the file that it leaves in the cache. Raises RuntimeError,
    with what the process wrote last, if it fails.
    """
    marker = cache_folder() / mark
    if is_complete(marker):
        return
    if marker.exists():
        _LOG.warning("compiled kernels in %s are damaged or gone: they are made again", marker.parent)
        shutil.rmtree(marker.parent, ignore_errors=True)
    _LOG.warning("compiling kernels for this machine, once; they are kept in %s", marker.parent)
    start = time.monotonic()
    command = [sys.executable, "-P", "-m", module, WITH_PARENT]  # -P: nothing is imported from the folder it runs in
    reading, writing = os.pipe()  # its other end is closed when this process ends, however it does
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=reading, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"compiling kernels took longer than {TIMEOUT_S} s") from error
    finally:
        os.close(reading)
        os.close(writing)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise RuntimeError(f"compiling kernels failed with status {done.returncode}: {last}")
    _LOG.warning("compiled kernels in %.0f s", time.monotonic() - start)


def is_complete(marker: Path) -> bool:
    """Whether all files are there that were when the mark was left, none shorter than then."""
    try:
        sizes = json.loads(marker.read_text())
        return all((marker.parent / name).stat().st_size >= size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def leave_mark(marker: Path) -> None:
    """Say that the cache is complete, and which files it has, of how many bytes."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    sizes = {one.name: one.stat().st_size for one in marker.parent.glob("*.nb[ic]")}
    partial = marker.with_name(f"{marker.name}.{os.getpid()}")
    partial.write_text(json.dumps(sizes))
    partial.replace(marker)


def end_with_parent() -> None:
    """End this process when the one that started it has ended, so that nobody is left compiling for it."""
    if WITH_PARENT in sys.argv:

        def wait() -> None:
            os.read(0, 1)  # not through the buffer of sys.stdin, which the interpreter locks when it ends
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


def check_kernels() -> None:
    """Run a small model of each format, and draw, and compare with NumPy's; this is what compiles."""
    from treadle_server.model.decoder import Decoder

    from treadle_kernels.backend import KernelBackend

    exact, rounded = KernelBackend(num_threads=1), KernelBackend(num_threads=1, rounded=True)
    cases = [("float32", exact), ("bfloat16", exact), ("bfloat16", rounded), *((one, exact) for one in QUANTISED_BITS)]
    for stored, backend in cases:
        params = _draw(stored)
        decoders = (Decoder(SMALL, params, backend=backend), Decoder(SMALL, params))
        batch = Batch.of([np.arange(19), np.arange(20, 23)])
        logits = [decoder.head(decoder.forward(batch)) for decoder in decoders]
        error = float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max())
        rounds = backend is rounded or stored in QUANTISED_BITS
        if not error < (ROUNDED_TOLERANCE if rounds else TOLERANCE):
            raise RuntimeError(f"compiled kernels are off by {error} for weights in {stored}")
    row = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    for u in (0.1, 0.5, 0.9):
        found = [function(row, u, lambda: np.empty_like(row))[0] for function in (exact.faster(draw), draw)]
        if found[0] != found[1]:
            raise RuntimeError(f"compiled code draws token {found[0]} instead of {found[1]}")


def _draw(stored: str) -> Mapping[str, Weight]:
    """Draw the small model's parameters in a stored format."""
    import ml_dtypes
    from treadle_server.checkpoints.quantising import quantise
    from treadle_server.model.params import Params, random_arrays

    arrays = random_arrays(SMALL, seed=0, scale=0.2)
    if stored in QUANTISED_BITS:
        return quantise(Path("small"), SMALL, Params.from_arrays(arrays), stored)
    dtype = ml_dtypes.bfloat16 if stored == "bfloat16" else np.float32
    return Params.from_arrays({name: array.astype(dtype) for name, array in arrays.items()})


def main(folder: Path) -> None:
    """Compile, compare, and mark the cache as complete."""
    end_with_parent()
    check_kernels()
    leave_mark(folder / MARK)


if __name__ == "__main__":
    main(cache_folder())
