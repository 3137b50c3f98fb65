"""Python values into protobuf fields, each checked first for what protobuf cannot carry.

What protobuf can carry but the server refuses, such as NaN or a top_p of 7, is sent: the server says why in its words.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, cast

from treadle_protos.v1.value_pb2 import Value

from treadle_client._exceptions import InvalidArgumentError, Violation

_INT64: Final = (-(2**63), 2**63 - 1)
_INT32: Final = (-(2**31), 2**31 - 1)
_UINT32: Final = (0, 2**32 - 1)
_UINT64: Final = (0, 2**64 - 1)
_RANGES: Final = MappingProxyType({"INT64": _INT64, "SINT32": _INT32, "UINT32": _UINT32, "UINT64": _UINT64})
_MAX_DEPTH: Final = 30  # three messages a level, and protobuf reads no more than 100


def refuse(path: str, expected: str, value: object) -> InvalidArgumentError:
    """Make the error of one field; the value is shown with its type, shortened."""
    shown = reprlib.repr(value).encode("ascii", "backslashreplace").decode()
    return InvalidArgumentError.of([Violation(path, f"expected {expected}, got {type(value).__name__} {shown}")])


def to_text(value: object, path: str) -> str:
    """Return `value` if it is a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise refuse(path, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"character {error.start} is half of a surrogate pair, which UTF-8 cannot hold"
        raise InvalidArgumentError.of([Violation(path, message)]) from None
    return value


def to_bool(value: object, path: str) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise refuse(path, "true or false", value)
    return value


def to_int(value: object, path: str, limits: tuple[int, int] = _INT64) -> int:
    """Return `value` as an int if it is a whole number (not a bool, not 3.0) within `limits`, both included."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not limits[0] <= int(value) <= limits[1]:
        raise refuse(path, f"a whole number from {limits[0]} to {limits[1]}", value)
    return int(value)


def to_float(value: object, path: str) -> float:
    """Return `value` as a float if it is a number (not a bool) that a double can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refuse(path, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise refuse(path, "a number from -1.8e308 to 1.8e308", value) from None


def to_items(value: object, path: str, expected: str) -> list[object]:
    """Return the items of a list, tuple or other iterable; a text, bytes or mapping is none."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise refuse(path, expected, value)
    return list(value)


def to_token_ids(value: object, path: str) -> list[int]:
    """Return token ids that uint32 can hold."""
    items = to_items(value, path, "a list of token ids")
    return [to_int(item, f"{path}[{i}]", _UINT32) for i, item in enumerate(items)]


def enum_names(descriptor: Any) -> dict[str, int]:
    """Return the numbers of a prefixed enum by their short names: RAW of LOGPROBS_MODE_RAW is `raw`."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {v.name.removeprefix(prefix).lower(): v.number for v in descriptor.values if v.number}


def to_scalar(field: Any, value: object, path: str) -> object:
    """Return `value` as the protobuf field wants it: a bool, number, text, or enum value by its short name."""
    if field.enum_type is not None:
        names = enum_names(field.enum_type)
        if not isinstance(value, str) or value not in names:
            raise refuse(path, " or ".join(map(repr, names)), value)
        return names[value]
    if field.type == field.TYPE_BOOL:
        return to_bool(value, path)
    if field.type == field.TYPE_DOUBLE:
        return to_float(value, path)
    if field.type == field.TYPE_STRING:
        return to_text(value, path)
    return to_int(value, path, next(r for name, r in _RANGES.items() if field.type == getattr(field, f"TYPE_{name}")))


def set_field(message: Any, name: str, value: object, path: str) -> None:
    """Set a field as its descriptor declares it: scalars, alone or repeated; a message stands for its only field.

    Such a message tells an empty list from none at all.
    """
    field = message.DESCRIPTOR.fields_by_name[name]
    current: Any = getattr(message, name)
    if isinstance(current, MutableMapping):
        _set_map(current, field, value, path)
    elif isinstance(current, MutableSequence) and field.message_type is not None:
        for i, item in enumerate(to_items(value, path, "a list of lists")):
            _set_only_field(cast("Any", current).add(), item, f"{path}[{i}]")
    elif field.message_type is not None:
        _set_only_field(current, value, path)
    elif isinstance(current, MutableSequence):
        kind = "texts" if field.type == field.TYPE_STRING else "numbers"
        items = to_items(value, path, f"a list of {kind}")
        current.extend([to_scalar(field, item, f"{path}[{i}]") for i, item in enumerate(items)])
    else:
        setattr(message, name, to_scalar(field, value, path))


def _set_only_field(message: Any, value: object, path: str) -> None:
    message.SetInParent()
    set_field(message, message.DESCRIPTOR.fields[0].name, value, path)


def _set_map(current: MutableMapping[object, object], field: Any, value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        raise refuse(path, "a mapping", value)
    types = field.message_type.fields_by_name
    for key, item in value.items():
        current[to_scalar(types["key"], key, f"{path} (a key)")] = to_scalar(types["value"], item, f"{path}.{key}")


def to_value(value: object, path: str, depth: int = 0) -> Value:
    """Return a stage parameter's typed value; bool, int and float stay apart."""
    if depth > _MAX_DEPTH:
        raise refuse(path, f"at most {_MAX_DEPTH} levels of lists and mappings", value)
    if isinstance(value, bool):
        return Value(bool_value=value)
    if isinstance(value, Integral):
        return Value(int_value=to_int(value, path))
    if isinstance(value, Real):
        return Value(double_value=to_float(value, path))
    if isinstance(value, str):
        return Value(string_value=to_text(value, path))
    if isinstance(value, Mapping):
        return _map_value(value, path, depth)
    return _list_value(value, path, depth)


def _map_value(value: Mapping[object, object], path: str, depth: int) -> Value:
    result = Value()
    result.map_value.SetInParent()
    for key, item in value.items():
        name = to_text(key, f"{path} (a name)")
        result.map_value.values[name].CopyFrom(to_value(item, f"{path}.{name}", depth + 1))
    return result


def _list_value(value: object, path: str, depth: int) -> Value:
    items = to_items(value, path, "true, false, a number, a text, a list or a mapping")
    result = Value()
    result.list_value.SetInParent()
    result.list_value.values.extend([to_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)])
    return result
