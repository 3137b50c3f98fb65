"""The plugins that authors are shown: the template, and the one in plugins/README.md."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api import ModelInfo, RequestResult
from treadle_plugin_api.testing import check_stage
from treadle_server.engine.chain import SamplingChain, StageSpec, sample_rows
from treadle_server.plugins import PluginManager

PLUGINS = Path(__file__).parents[2] / "plugins"
TOKENS = (b"", b"hello", b"world", b"WIRED")


@pytest.fixture
def load_manager(monkeypatch, built_in):
    """Loads a folder of plugins beside the built-in ones."""
    monkeypatch.setattr("treadle_server.plugins.manager.installed_sources", lambda: iter([built_in]))
    return lambda folder: PluginManager.load([folder], strict=True)


@pytest.fixture
def load(load_manager):
    """The same, for its stages."""
    return lambda folder: load_manager(folder).registry


def greedy_token(registry, logits: list[float], stages: list[StageSpec]) -> bytes:
    """The token that a greedy request with the stages chooses."""
    info = ModelInfo(
        name="tiny",
        vocab_size=len(TOKENS),
        context_length=8,
        eos_ids=frozenset([0]),
        token_bytes=lambda token_id: TOKENS[token_id],
        encode=lambda text: [],
    )
    chain = SamplingChain.resolve(registry, explicit={"temperature": 0}, defaults={}, stages=stages, model_info=info)
    (sample,) = sample_rows([chain.begin([1], seed=0)], np.array([logits], dtype=np.float32))
    return TOKENS[sample.token_id]


def test_template_changes_the_output(load):
    """The template's stage bans letters, whatever is most likely."""
    registry = load(PLUGINS / "template" / "src")
    logits = [0.0, 3, 1, 2]
    assert greedy_token(registry, logits, []) == b"hello"
    assert greedy_token(registry, logits, [StageSpec("lipogram", {"letters": "h"})]) == b"WIRED"
    assert greedy_token(registry, logits, [StageSpec("lipogram", {"letters": "e"})]) == b"world"


def test_the_readme_plugin_works(load, tmp_path: Path):
    """The first listing of plugins/README.md is a plugin that loads and keeps the contract."""
    listing = re.search(r"```python\n(.*?)```", (PLUGINS / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert listing is not None
    (tmp_path / "sharpen.py").write_text(listing[1], encoding="utf-8")
    registry = load(tmp_path)
    check_stage(registry.get("sharpen").cls, strength=3.0)
    assert registry.get("sharpen").doc == "Multiply the distance of every logit to the largest."


def test_the_readme_observer_counts(load_manager, tmp_path: Path):
    """The observer of plugins/README.md loads and counts the tokens of the results it is told."""
    page = (PLUGINS / "README.md").read_text(encoding="utf-8")
    (listing,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class TokenCounter" in text)
    (tmp_path / "tokens.py").write_text(listing, encoding="utf-8")
    manager = load_manager(tmp_path)
    for _ in range(2):
        manager.observers.finished(
            lambda: RequestResult(
                request_id="r", model="m", reasons=("eos",), error="", num_prompt_tokens=3, num_generated_tokens=4,
                queue_s=0.0, prefill_s=0.0, decode_s=0.0,
            )
        )  # fmt: skip
    manager.observers.wait()
    (plugin,) = (module for name, module in sys.modules.items() if re.fullmatch("treadle_local_.*_tokens", name))
    assert plugin.counter.tokens == {"m": 8}
