"""Finding and loading plugins: one by one, all of a plugin or none, each failure with its reason."""

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from treadle_plugin_api import Field, Knob, Select, Stage, hookimpl
from treadle_server.errors import PluginError
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource

PLUGIN_FILE = '''
from __future__ import annotations
from treadle_plugin_api import Field, Stage, hookimpl

class Halve(Stage):
    """Halve every logit."""

    name = "halve"
    kind = "transform"
    factor: float = Field(default=0.5, gt=0, description="factor")

    def apply(self, logits, context, state=None):
        return logits * self.factor

@hookimpl
def treadle_register_stages(register):
    register(Halve)
'''


def stage_called(name: str, **attributes: object) -> type[Stage]:
    """A stage class that changes nothing."""
    body = {"apply": lambda self, logits, context, state=None: logits, "__module__": __name__, "__doc__": "Nothing."}
    return type("Same", (Stage,), {"name": name, "kind": "mask", **body, **attributes})


def status_of(manager: PluginManager, name: str):
    """The line of one plugin."""
    return next(one for one in manager.plugins if one.name == name)


def failing(error: BaseException) -> PluginSource:
    """A plugin whose import raises."""

    def load() -> object:
        raise error

    return PluginSource("broken", "broken-dist", "0.3", load)


def test_built_in_stages_come_through_the_door(built_in):
    """The built-in plugin is active and brings every stage, with kind, schema and one line of text."""
    manager = PluginManager([built_in], strict=True)
    names = {entry.name: entry.kind for entry in manager.registry.entries()}
    assert (
        names.items()
        >= {
            "greedy": "select",
            "categorical": "select",
            "temperature": "transform",
            "top_k": "filter",
            "top_p": "filter",
            "min_tokens": "mask",
        }.items()
    )
    top_k = manager.registry.get("top_k")
    assert top_k.doc == "Keep the k most likely tokens."
    assert top_k.schema()["properties"]["top_k"]["minimum"] == 1
    assert (top_k.plugin, top_k.distribution, top_k.built_in) == ("samplers", "treadle-samplers", True)


def test_foreign_stage_is_registered(source_of, built_in):
    """A foreign plugin's stage can be looked up, with where it came from."""
    manager = PluginManager([built_in, source_of(stage_called("same"))])
    entry = manager.registry.get("same")
    assert (entry.plugin, entry.distribution, entry.version, entry.built_in) == ("mine", "my-stages", "1.2", False)
    assert status_of(manager, "mine").status == "active"


@pytest.mark.parametrize("error", [ImportError("no module x"), RuntimeError("boom"), SystemExit(3), SyntaxError("bad")])
def test_one_broken_plugin_stops_nothing(built_in, source_of, error):
    """A plugin that cannot be imported is listed with its reason; the others are there."""
    manager = PluginManager([built_in, failing(error), source_of(stage_called("same"))])
    broken = status_of(manager, "broken")
    assert broken.status == "failed"
    assert type(error).__name__ in broken.reason
    assert {"same", "greedy"} <= {entry.name for entry in manager.registry.entries()}


def test_strict_makes_failures_fatal(built_in):
    """With `strict` a failure raises, with plugin and reason."""
    with pytest.raises(PluginError, match=r"'broken'.*boom"):
        PluginManager([built_in, failing(RuntimeError("boom"))], strict=True)


def test_all_stages_of_a_plugin_or_none(built_in, source_of):
    """One bad class keeps the good ones of its plugin out, too."""
    manager = PluginManager([built_in, source_of(stage_called("good"), stage_called("Bad Name"))])
    assert "good" not in manager.registry
    assert "Bad Name" in status_of(manager, "mine").reason


def test_a_hook_that_raises_half_way_registers_nothing(built_in):
    """Classes registered before the hook raised are not kept."""

    def treadle_register_stages(register):
        register(stage_called("first"))
        raise ValueError("half way")

    plugin = SimpleNamespace(treadle_register_stages=hookimpl(treadle_register_stages))
    manager = PluginManager([built_in, PluginSource("half", "half", "1", lambda: plugin)])
    assert "first" not in manager.registry
    assert status_of(manager, "half").reason == "ValueError: half way"


def test_unknown_hooks_are_refused(built_in):
    """A misspelt hook is a failure, not silence."""

    def treadle_register_stage(register):
        """Misspelt."""

    plugin = SimpleNamespace(treadle_register_stage=hookimpl(treadle_register_stage))
    manager = PluginManager([built_in, PluginSource("typo", "typo", "1", lambda: plugin)])
    assert "treadle_register_stage" in status_of(manager, "typo").reason


def test_a_plugin_without_hooks_is_refused(built_in):
    """A forgotten @hookimpl is told."""
    plugin = SimpleNamespace(treadle_register_stages=lambda register: None)
    manager = PluginManager([built_in, PluginSource("bare", "bare", "1", lambda: plugin)])
    assert "@hookimpl" in status_of(manager, "bare").reason


def test_built_in_wins_over_a_foreign_duplicate(built_in, source_of):
    """A foreign `top_k` fails with its whole plugin; the built-in one serves on."""
    manager = PluginManager([built_in, source_of(stage_called("top_k"), stage_called("other"))])
    assert manager.registry.get("top_k").built_in
    assert "other" not in manager.registry
    assert (
        "'top_k' of 'mine' (my-stages 1.2) is built in: 'samplers' (treadle-samplers"
        in status_of(manager, "mine").reason
    )


def test_two_foreign_duplicates_both_fail(built_in, source_of):
    """Nobody wins by chance of order; each reason names both distributions."""
    sources = [source_of(stage_called("same"), name=name, distribution=f"{name}-dist") for name in ("one", "two")]
    manager = PluginManager([built_in, *sources])
    assert "same" not in manager.registry
    for name in ("one", "two"):
        line = status_of(manager, name)
        assert line.status == "failed"
        assert "one-dist" in line.reason
        assert "two-dist" in line.reason


def test_the_same_class_twice_is_once(built_in, source_of):
    """Registering one class twice is no conflict; two classes of one name are."""
    same = stage_called("same")
    assert "same" in PluginManager([built_in, source_of(same, same)], strict=True).registry
    with pytest.raises(PluginError, match="two stages called 'same'"):
        PluginManager([built_in, source_of(same, stage_called("same"))], strict=True)


def test_only_built_ins_have_knobs(built_in, source_of):
    """A foreign stage cannot take a plain knob."""
    from typing import Annotated

    class Grabbing(Stage):
        """Wants a knob."""

        name = "grabbing"
        kind = "mask"
        grab: Annotated[int, Knob(off=(0,))] = Field(default=0, description="x")

        def apply(self, logits, context, state=None):
            """Nothing."""
            return logits

    assert "plain knobs" in status_of(PluginManager([built_in, source_of(Grabbing)]), "mine").reason


@pytest.mark.parametrize("name", ["mine", "my-stages"])
def test_blocked_plugins_are_not_imported(built_in, name):
    """A blocked plugin, by its own name or its distribution's, is listed and never loaded."""

    def load() -> object:
        raise AssertionError("imported")

    manager = PluginManager([built_in, PluginSource("mine", "my-stages", "1", load)], blocked=[name])
    assert status_of(manager, "mine").status == "blocked"


def test_unknown_blocked_name_is_an_error(built_in):
    """A misspelt --no-plugin tells which plugins there are."""
    with pytest.raises(PluginError, match="'minne'; plugins found: samplers"):
        PluginManager([built_in], blocked=["minne"])


def test_built_in_stages_cannot_be_missing(monkeypatch, built_in):
    """Without the fallback selects no server starts, and the reason says why."""
    with pytest.raises(PluginError, match=r"greedy, categorical.*treadle-samplers is not installed"):
        PluginManager.load()


def test_entry_points_are_found(monkeypatch):
    """Installed plugins come from the entry point group, built-in ones first."""
    point = metadata.EntryPoint("samplers", "treadle_samplers.plugin", "treadle")
    monkeypatch.setattr(
        metadata.EntryPoint, "dist", SimpleNamespace(name="Treadle_Samplers", version="0.1.0"), raising=False
    )
    monkeypatch.setattr(metadata, "entry_points", lambda group: (point,) if group == "treadle" else ())
    assert PluginManager.load(strict=True).registry.get("greedy").built_in


@pytest.fixture
def installed(monkeypatch, built_in):
    """Only the built-in plugin is installed."""
    monkeypatch.setattr("treadle_server.plugins.manager.installed_sources", lambda: iter([built_in]))


def test_plugin_dir_loads_files_and_packages(installed, tmp_path: Path):
    """Every module and package of a folder is a plugin; names that start with an underscore are not."""
    (tmp_path / "halving.py").write_text(PLUGIN_FILE, encoding="utf-8")
    package = tmp_path / "thirds"
    package.mkdir()
    (package / "__init__.py").write_text("from .stages import treadle_register_stages", encoding="utf-8")
    (package / "stages.py").write_text(PLUGIN_FILE.replace("halve", "third"), encoding="utf-8")
    (tmp_path / "_private.py").write_text("raise RuntimeError", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no plugin", encoding="utf-8")
    manager = PluginManager.load([tmp_path], strict=True)
    assert [one.name for one in manager.plugins] == ["samplers", "halving", "thirds"]
    assert manager.registry.get("halve").distribution == str(tmp_path / "halving.py")
    assert "third" in manager.registry


def test_plugin_dir_takes_one_file(installed, tmp_path: Path):
    """The path of a single file works while developing."""
    file = tmp_path / "random.py"  # a name of the standard library does no harm
    file.write_text(PLUGIN_FILE, encoding="utf-8")
    assert "halve" in PluginManager.load([file]).registry


def test_plugin_dir_failures_are_listed(installed, tmp_path: Path):
    """A file that raises is a failed plugin and leaves no half-made module behind."""
    (tmp_path / "bad.py").write_text("import sys; sys.exit('bye')", encoding="utf-8")
    manager = PluginManager.load([tmp_path])
    assert status_of(manager, "bad").reason == "SystemExit: bye"
    assert not [name for name in sys.modules if name.endswith("_bad") and name.startswith("treadle_local")]


def test_missing_plugin_dir_is_an_error(installed, tmp_path: Path):
    """A wrong path is told at once."""
    with pytest.raises(PluginError, match="there is no such folder"):
        PluginManager.load([tmp_path / "nowhere"])


def test_unknown_stage_lists_the_known(manager_of):
    """Looking up what is not there names what is."""
    with pytest.raises(KeyError, match=r"'nope'; known stages: .*top_p"):
        manager_of().registry.get("nope")


def test_select_base_is_told_apart(manager_of):
    """Only subclasses of Select choose tokens."""
    registry = manager_of().registry
    selects = [entry.name for entry in registry.entries() if entry.is_select]
    assert selects == ["categorical", "greedy", "mirostat", "adaptive_p"]
    assert issubclass(registry.get("greedy").cls, Select)
