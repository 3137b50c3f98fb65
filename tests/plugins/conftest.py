"""Fixtures for the plugin and sampler tests: no test sees a plugin that it does not name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import SimpleNamespace

import pytest
import treadle_samplers.plugin
from treadle_plugin_api import ModelInfo, Select, Stage, hookimpl
from treadle_server.engine.chain import SamplingChain, StageSpec
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import BUILT_IN_DISTRIBUTION, PluginSource

StageClass = type[Stage | Select]


@pytest.fixture(autouse=True)
def blocked_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed entry points do not exist, whatever the machine has."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())


def _source_of(*classes: StageClass, name: str = "mine", distribution: str = "my-stages") -> PluginSource:
    def treadle_register_stages(register: Callable[[StageClass], None]) -> None:
        for cls in classes:
            register(cls)

    plugin = SimpleNamespace(treadle_register_stages=hookimpl(treadle_register_stages))
    return PluginSource(name, distribution, "1.2", lambda: plugin)


def _built_in() -> PluginSource:
    return PluginSource("samplers", BUILT_IN_DISTRIBUTION, "0.1.0", lambda: treadle_samplers.plugin)


@functools.cache  # a manager never changes, and registering checks every class
def _manager_of(*classes: StageClass) -> PluginManager:
    return PluginManager([_built_in(), *([_source_of(*classes)] if classes else [])], strict=True)


def _model_info(vocab_size: int) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        vocab_size=vocab_size,
        context_length=64,
        eos_ids=frozenset([0]),
        token_bytes=lambda token_id: b"%d" % token_id,
        encode=lambda text: [ord(character) % vocab_size for character in text],
    )


def _resolve(
    *classes: StageClass,
    vocab_size: int = 8,
    stages: Sequence[StageSpec] = (),
    order: Sequence[str] | None = None,
    defaults: Mapping[str, object] | None = None,
    **knobs: object,
) -> SamplingChain:
    return SamplingChain.resolve(
        _manager_of(*classes).registry,
        explicit=knobs,
        defaults=defaults or {},
        stages=stages,
        order=order,
        model_info=_model_info(vocab_size),
    )


@pytest.fixture
def source_of() -> Callable[..., PluginSource]:
    """Makes a foreign plugin of stage classes, as discovery would find it."""
    return _source_of


@pytest.fixture
def built_in() -> PluginSource:
    """The built-in plugin, as discovery finds it."""
    return _built_in()


@pytest.fixture
def manager_of() -> Callable[..., PluginManager]:
    """Makes a manager of the built-in stages and one foreign plugin of the given classes."""
    return _manager_of


@pytest.fixture
def resolve() -> Callable[..., SamplingChain]:
    """Resolves a request's knobs, stages and order on a server with the built-in stages and the given classes."""
    return _resolve
