"""For authors of plugins: a pytest fixture that shuts out every plugin that a test does not name.

    pytest_plugins = ["treadle_server.testing_plugins"]  # in the top conftest.py

    def test_my_stage(isolated_registry):
        registry = isolated_registry(MyStage)
        ...

It needs pytest: `pip install 'treadle-server[testing]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from treadle_plugin_api import Select, Stage, hookimpl

from treadle_server.plugins import PluginManager, StageRegistry
from treadle_server.plugins.discovery import PluginSource, installed_sources

IsolatedRegistry = Callable[..., StageRegistry]

_FOUND_BY = "treadle_server.plugins.manager.installed_sources"


@pytest.fixture
def isolated_registry(monkeypatch: pytest.MonkeyPatch) -> IsolatedRegistry:
    """Hide installed plugins until the test ends, but for the built-in ones and the stages that it is called with.

    Called with stage classes, it registers them and returns the registry; a broken one raises PluginError. What the
    test loads afterwards, such as a LanguageModel, finds the same.
    """
    built_in = [source for source in installed_sources() if source.built_in]
    monkeypatch.setattr(_FOUND_BY, lambda: iter(built_in))

    def register(*classes: type[Stage | Select]) -> StageRegistry:
        sources = [*built_in, _source(classes)] if classes else built_in
        monkeypatch.setattr(_FOUND_BY, lambda: iter(sources))
        return PluginManager.load(strict=True).registry

    return register


def _source(classes: tuple[type[Stage | Select], ...]) -> PluginSource:
    """A plugin of these stages, as discovery would find it."""

    @hookimpl
    def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
        for cls in classes:
            register(cls)

    plugin = SimpleNamespace(treadle_register_stages=treadle_register_stages)
    return PluginSource("test", "test", "", lambda: plugin)
