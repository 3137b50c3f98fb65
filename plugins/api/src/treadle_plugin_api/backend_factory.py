"""What a plugin registers as a compute backend: its name, and how one is made.

register(BackendFactory("mine", make_backend, dtypes=("float32",), keeps=("bfloat16",)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from treadle_plugin_api.backend import ITEM_BYTES, QUANTISED_BITS, ComputeBackend, DifferentiableBackend
from treadle_plugin_api.contract import NAME_PATTERN

RESERVED = ("auto", "numpy")
DTYPES = ("float32", "float64")
ACTIVATIONS = ("float32", "bf16")


@dataclass(frozen=True, slots=True)
class BackendFactory:
    """A compute backend by its name.

    Attributes:
        name: what `--backend` calls it: lower-case letters, digits, underscores.
        make: called as `make(dtype, numerics)`, numerics `fast` or `reproducible`, once for each model that is loaded
            and before it is served: slow preparation belongs there, and a log line that says so. Raises what it likes
            where the machine has not what it needs; loading then fails with its reason. Where other activations than
            float32 are asked for, which happens only if it names them, as `make(dtype, numerics, activations=...)`.
        dtypes: number types that it computes in, of `float32` and `float64`.
        keeps: formats of weights that it multiplies with as they are stored, without widening them in memory; with
            `int8` and `int4` it can be asked to quantise a model that it loads (`--quantize`).
        activations: what activations may be rounded to before they are multiplied: `float32` (not at all), `bf16`.
        make_training: called as `make_training(dtype)` for a model that is to be trained; raises like `make`. None
            where it cannot train.
    """

    name: str
    make: Callable[..., ComputeBackend[Any]]
    dtypes: tuple[str, ...] = ("float32",)
    keeps: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("float32",)
    make_training: Callable[[str], DifferentiableBackend[Any]] | None = None


def backend_problems(backends: Iterable[object]) -> Iterator[str]:
    """Yield every reason why backends cannot be registered."""
    seen: set[str] = set()
    for backend in backends:
        if not isinstance(backend, BackendFactory):
            yield f"backend {backend!r:.80} is no treadle_plugin_api.backend_factory.BackendFactory"
            continue
        name = backend.name
        if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
            yield f"backend {name!r:.80} must be called by lower-case letters, digits and underscores"
        elif name in RESERVED or name in seen:
            yield f"backend {name!r} is {'built in' if name in RESERVED else 'registered twice'}"
        if not callable(backend.make):
            yield f"backend {name!r:.80} has {backend.make!r:.80} where a function belongs"
        if backend.make_training is not None and not callable(backend.make_training):
            yield f"backend {name!r:.80} trains by {backend.make_training!r:.80}, which is no function"
        yield from _choice_problems(f"backend {name!r:.80}", "dtypes", backend.dtypes, DTYPES)
        yield from _choice_problems(f"backend {name!r:.80}", "keeps", backend.keeps, (*ITEM_BYTES, *QUANTISED_BITS))
        yield from _choice_problems(f"backend {name!r:.80}", "activations", backend.activations, ACTIVATIONS)
        seen.add(str(name))


def _choice_problems(what: str, field: str, values: object, known: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(values, tuple) or any(value not in known for value in values):
        yield f"{what} has {field} {values!r:.80}, not a tuple of {', '.join(known)}"
