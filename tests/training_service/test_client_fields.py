"""What the training client refuses before it sends anything, and that both clients are one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from treadle_client import (
    AsyncMetricsStream,
    AsyncTrainingClient,
    InvalidArgumentError,
    MetricsStream,
    TrainingClient,
    TrainingRow,
    _training_models,
)


def public(cls: type) -> dict[str, Callable[..., object]]:
    """Return the public methods of a class by name."""
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def test_training_clients_have_the_same_methods() -> None:
    """So have their streams of metrics."""
    assert public(TrainingClient).keys() == public(AsyncTrainingClient).keys()
    assert public(MetricsStream).keys() == public(AsyncMetricsStream).keys()


@pytest.mark.parametrize("name", ["__init__", *public(TrainingClient)])
def test_training_clients_take_the_same_arguments(name: str) -> None:
    """Each method takes the same arguments with the same defaults in both clients."""
    both = (inspect.signature(getattr(cls, name)).parameters for cls in (TrainingClient, AsyncTrainingClient))
    sync, asynchronous = (list(parameters.values()) for parameters in both)
    assert sync == asynchronous


@pytest.mark.parametrize("name", sorted(public(TrainingClient)))
def test_asynchronous_training_methods_are_coroutines(name: str) -> None:
    """All are awaited but `stream_metrics`, which is iterated."""
    assert inspect.iscoroutinefunction(getattr(AsyncTrainingClient, name)) == (name != "stream_metrics")


def test_training_models_are_frozen_and_slotted() -> None:
    """Those that only the client makes are keyword-only."""
    for cls in (v for v in vars(_training_models).values() if dataclasses.is_dataclass(v)):
        assert cls.__dataclass_params__.frozen  # type: ignore[union-attr]
        assert "__slots__" in vars(cls)
        keyword_only = all(field.kw_only for field in dataclasses.fields(cls))
        assert keyword_only == (cls.__name__ not in {"TrainingRow", "Message"})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ("the cat", "rows"),
        ([7], "rows[0].prompt"),
        ([["a", "b"]], "rows[0].token_ids[0]"),
        ([[1.5]], "rows[0].token_ids[0]"),
        ([TrainingRow([1], labels=[2**40])], "rows[0].labels[0]"),
        ([TrainingRow([1], labels=[1.0])], "rows[0].labels[0]"),  # type: ignore[list-item]
        ([[1], TrainingRow([1], weights=["x"])], "rows[1].weights[0]"),  # type: ignore[list-item]
        ([TrainingRow([1], append_eos=1)], "rows[0].append_eos"),  # type: ignore[arg-type]
    ],
)
def test_rows_that_cannot_be_sent_are_named(rows: Any, field: str) -> None:
    """Before anything is sent: there is no trainer here."""
    with TrainingClient("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError) as caught:
        client.compute_loss(rows)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    "keywords",
    [{"betas": 0.9}, {"betas": (0.9,)}, {"lr": "x"}, {"loss": 3}, {"reduction": "max"}, {"loss_options": {"a": None}}],
)
def test_settings_that_cannot_be_sent_are_refused(keywords: dict[str, Any]) -> None:
    """With the keyword in the message."""
    with TrainingClient("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match=next(iter(keywords))):
        client.step([[1, 2]], **{"lr": 0.1, **keywords})
