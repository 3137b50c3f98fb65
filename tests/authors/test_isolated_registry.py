"""The fixture that keeps other plugins out of an author's tests."""

import pytest
from treadle_plugin_api import Stage
from treadle_server.errors import PluginError
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource


class Same(Stage):
    """Change nothing."""

    name = "same"
    kind = "mask"

    def apply(self, logits, context, state=None):
        """Nothing."""
        return logits


@pytest.fixture
def with_foreign_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which some other plugin is installed, a broken one."""
    from treadle_server.plugins import discovery, manager

    foreign = PluginSource("foreign", "foreign", "1", lambda: 1 / 0)
    for module in (discovery, manager):
        found = [*discovery.installed_sources(), foreign]
        monkeypatch.setattr(module, "installed_sources", lambda found=found: iter(found))


def names() -> set[str]:
    """Names of the plugins that a load finds."""
    return {plugin.name for plugin in PluginManager.load().plugins}


def test_only_what_is_named_is_there(with_foreign_plugin, isolated_registry):
    """Built-in stages and those the test names; whatever else is installed is not even looked at."""
    assert "foreign" not in names()
    registry = isolated_registry(Same)
    assert registry.get("same").cls is Same
    assert "top_k" in registry
    assert names() >= {"samplers", "test"}
    assert "foreign" not in names()
    assert "same" not in isolated_registry()


def test_a_broken_stage_is_told(isolated_registry):
    """What a server would list as failed raises."""
    with pytest.raises(PluginError, match="not a subclass"):
        isolated_registry(int)
