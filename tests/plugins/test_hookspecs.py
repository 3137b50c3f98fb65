"""The hooks themselves."""

import inspect
from pathlib import Path

import pytest
from treadle_plugin_api import hookspecs

ROOT = Path(__file__).parents[2]
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("treadle_"))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str):
    """Each hook has a docstring, and an entry of its own in the page for authors, with its arguments."""
    function = getattr(hookspecs, hook)
    assert inspect.getdoc(function)
    entry = f"`{hook}({', '.join(inspect.signature(function).parameters)})`\n: "
    assert entry in (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_tested(hook: str):
    """Each hook is implemented in some other test file."""
    others = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert any(f"def {hook}(" in path.read_text(encoding="utf-8") for path in others)


def test_there_are_hooks():
    """The tests above do not pass for want of hooks."""
    assert "treadle_register_stages" in HOOKS
