"""What the package promises: its names, and one surface for both clients."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import treadle_client
from treadle_client import AsyncClient, AsyncStream, Client, Stream, TreadleClientError, _exceptions, _models


def public(cls: type) -> dict[str, Callable[..., object]]:
    """Return the public methods of a class by name."""
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def test_public_names_are_explicit() -> None:
    """`__all__` is sorted, has every public name of the models and exceptions, and nothing else is public."""
    names = set(treadle_client.__all__)
    assert len(names) == len(treadle_client.__all__)
    assert {n for n in vars(treadle_client) if not n.startswith("_")} == names
    for module in (_models, _exceptions):
        defined = {n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
        assert {n for n in defined if not n.startswith("_")} <= names


def test_clients_have_the_same_methods() -> None:
    """Client and AsyncClient have the same public names; so have their streams."""
    assert public(Client).keys() == public(AsyncClient).keys()
    assert public(Stream).keys() == public(AsyncStream).keys()


@pytest.mark.parametrize("name", ["__init__", *public(Client)])
def test_clients_take_the_same_arguments(name: str) -> None:
    """Each method takes the same arguments with the same defaults in both clients."""
    sync, asynchronous = (inspect.signature(getattr(cls, name)).parameters for cls in (Client, AsyncClient))
    assert list(sync.values()) == list(asynchronous.values())


@pytest.mark.parametrize("name", sorted(public(Client)))
def test_asynchronous_methods_are_coroutines(name: str) -> None:
    """All of AsyncClient is awaited but `stream`, which is iterated."""
    assert inspect.iscoroutinefunction(getattr(AsyncClient, name)) == (name != "stream")


def test_models_are_frozen_and_slotted() -> None:
    """Results cannot be changed by accident; those that only the client makes are keyword-only."""
    for cls in (v for v in vars(_models).values() if dataclasses.is_dataclass(v)):
        assert cls.__dataclass_params__.frozen  # type: ignore[union-attr]
        assert "__slots__" in vars(cls)
        keyword_only = all(field.kw_only for field in dataclasses.fields(cls))
        assert keyword_only == (cls.__name__ not in {"Message", "Stage"})  # type: ignore[union-attr]


def test_the_drawn_tree_is_the_tree() -> None:
    """The module docstring draws exactly the public exceptions, all under the base."""
    drawn = re.findall(r"^(?:[├└]── )?(\w+Error)\b", _exceptions.__doc__ or "", re.MULTILINE)
    errors = {n for n in treadle_client.__all__ if n.endswith("Error")}
    assert sorted(drawn) == sorted(errors)
    assert all(issubclass(getattr(treadle_client, name), TreadleClientError) for name in errors)


def test_one_module_knows_status_codes() -> None:
    """Only `_status` names grpc.StatusCode."""
    folder = Path(treadle_client.__file__).parent
    assert [p.name for p in sorted(folder.glob("*.py")) if "grpc.StatusCode." in p.read_text("utf-8")] == ["_status.py"]


def test_the_package_is_typed() -> None:
    """The marker for type checkers is there."""
    assert Path(importlib.import_module("treadle_client").__file__ or "").with_name("py.typed").exists()
