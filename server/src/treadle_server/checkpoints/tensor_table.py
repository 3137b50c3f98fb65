"""What a family says of its files, checked before it is used: a plugin's family may return anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.family import Family, TensorEntry

from treadle_server.errors import CheckpointError
from treadle_server.model.params import Shape, param_shapes

_HEAD = "head.weight"


def family_failed(family: Family, what: str) -> CheckpointError:
    """Return the error for a family that breaks its contract."""
    return CheckpointError(f"the family of model_type {family.model_type!r} is broken: {what}")


def read_ignored(family: Family) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of the tensors to be passed over; raises CheckpointError for what is no pattern."""
    if isinstance(family.ignored, str):
        raise family_failed(family, f"ignored is {family.ignored!r:.80}, not a tuple of regular expressions")
    try:
        return tuple(re.compile(pattern) for pattern in family.ignored)
    except (re.error, TypeError) as error:
        raise family_failed(family, f"ignored is {family.ignored!r:.80}: {error}") from error


def read_tables(family: Family, config: DecoderConfig) -> list[tuple[TensorEntry, ...]]:
    """Return the family's tensor tables; raises CheckpointError unless each has every parameter exactly once."""
    try:
        tables = [tuple(table(config)) for table in (family.tensor_table, *family.other_tables)]
    except Exception as error:  # a plugin's family may raise anything
        raise family_failed(family, f"{type(error).__name__}: {error}") from error
    if not isinstance(family.optional_prefix, str):
        raise family_failed(family, f"optional_prefix is {family.optional_prefix!r:.80}, not a string")
    shapes = {_HEAD: (config.vocab_size, config.embedding_width), **param_shapes(config)}
    for table in tables:
        problem = next(_table_problems(table, shapes), None)
        if problem is not None:
            raise family_failed(family, problem)
    return tables


def _table_problems(table: tuple[object, ...], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what is wrong with a table, the worst first: what comes later may rely on what came before."""
    entries: list[TensorEntry] = []
    for entry in table:
        if isinstance(entry, TensorEntry):
            entries.append(entry)
            yield from _form_problems(entry)
        else:
            yield f"its tensor table holds {entry!r:.80}, not a TensorEntry"
    named = [param for entry in entries for param in entry.params]
    yield from (f"its tensor table has the unknown parameter {name!r}" for name in sorted({*named} - {*shapes}))
    yield from (f"its tensor table lacks {name!r}" for name in sorted({*shapes} - {*named}))
    yield from (f"its tensor table names twice {name!r}" for name in _repeated(named))
    names = [entry.file_name for entry in entries]
    yield from (f"its tensor table has two entries for the tensor {name!r}" for name in _repeated(names))
    for entry in entries:
        yield from _shape_problems(entry, [shapes[param] for param in entry.params])


def _repeated(names: list[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def _form_problems(entry: TensorEntry) -> Iterator[str]:
    what = f"the entry of tensor {entry.file_name!r:.80}"
    if not isinstance(entry.file_name, str):
        yield f"{what} has a file_name that is no string"
    params = entry.params
    if not (isinstance(params, tuple) and params and all(isinstance(param, str) for param in params)):
        yield f"{what} has the params {params!r:.80}, not a tuple of names"
    if type(entry.groups) is not int or entry.groups < 1:
        yield f"{what} has groups={entry.groups!r:.80}, not an integer from 1 on"
    if type(entry.stacked) is not int or entry.stacked < 0:
        yield f"{what} has stacked={entry.stacked!r:.80}, not an integer from 0 on"
    if type(entry.transposed) is not bool:
        yield f"{what} has transposed={entry.transposed!r:.80}, not True or False"


def _shape_problems(entry: TensorEntry, shapes: list[Shape]) -> Iterator[str]:
    what = f"the entry of tensor {entry.file_name!r:.80}"
    if len({shape[1:] for shape in shapes}) > 1:
        yield f"{what} joins parameters whose rows have different shapes: {[list(shape) for shape in shapes]}"
    for shape in shapes:
        if shape[0] % entry.groups:
            yield f"{what} has groups={entry.groups}, which do not divide {shape[0]} rows"
    num_rows = sum(shape[0] for shape in shapes)
    if entry.stacked and num_rows % entry.stacked:
        yield f"{what} has stacked={entry.stacked}, which does not divide {num_rows} rows"
    if entry.transposed and (entry.groups > 1 or entry.stacked or len(shapes[0]) != 2):
        yield f"{what} is transposed, which only a matrix that is neither grouped nor stacked can be"
