"""Plugins of the past: what was written for a version of the contract runs for ever, with the same results."""

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api import RequestInfo, RequestResult
from treadle_plugin_api.testing import check_stage, sample_model_info
from treadle_server.engine.chain import SamplingChain, StageSpec, sample_rows
from treadle_server.plugins import PluginManager

V1 = Path(__file__).parent / "frozen" / "v1_example.py"
STAGES = ("frozen_mask", "frozen_penalty", "frozen_noise", "frozen_filter", "frozen_select")
TOKENS = [43, 30, 14, 76, 1, 78, 23, 45, 79, 90, 21, 71, 8, 11, 36, 66, 45, 11, 21, 75, 76, 36, 66, 30]


@pytest.fixture
def manager(monkeypatch, built_in) -> PluginManager:
    """The built-in plugin and the frozen one."""
    monkeypatch.setattr("treadle_server.plugins.manager.installed_sources", lambda: iter([built_in]))
    return PluginManager.load([V1], strict=True)


def test_it_is_as_it_was():
    """A plugin that changes with treadle proves nothing: to change the file is to break the promise."""
    digest = hashlib.sha256(V1.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    assert digest == "46ee26d4c8b536363aa7eb85dec475eca76e362c308b102336141c98abfe3794"


@pytest.mark.parametrize("name", STAGES)
def test_its_stages_keep_the_contract(manager: PluginManager, name: str):
    """Each stage of version 1 passes the conformance suite."""
    check_stage(manager.registry.get(name).cls)


def test_it_writes_the_same_tokens(manager: PluginManager):
    """With all its stages in a chain, the numbers drawn and the tokens chosen are those of the first day."""
    chain = SamplingChain.resolve(
        manager.registry,
        explicit={},
        defaults={},
        stages=[StageSpec(name) for name in STAGES],
        model_info=sample_model_info(100),
    )
    sampler = chain.begin([1, 2, 3], seed=2026, choice=1, eos_ids=[0])
    logits = np.array([[4 * math.sin(i * i) for i in range(100)]], dtype=np.float32)
    tokens = []
    for _ in range(24):
        (sample,) = sample_rows([sampler], logits)
        sampler.accept(sample.token_id)
        tokens.append(sample.token_id)
    assert [stage.name for stage in chain.stages] == list(STAGES)
    assert tokens == TOKENS


def test_its_observers_are_called(manager: PluginManager):
    """Both hooks get what version 1 says of requests."""
    info = RequestInfo(request_id="r", model="m", chain=("greedy",), num_prompt_tokens=3, num_choices=1, max_tokens=5)
    result = RequestResult(
        request_id="r", model="m", reasons=("eos",), error="", num_prompt_tokens=3, num_generated_tokens=4,
        queue_s=0.0, prefill_s=0.0, decode_s=0.0,
    )  # fmt: skip
    manager.observers.started(lambda: info)
    manager.observers.finished(lambda: result)
    manager.observers.wait()
    seen = sys.modules[manager.registry.get("frozen_mask").cls.__module__].SEEN
    assert seen == [("started", ("r", "m", ("greedy",), 3)), ("finished", ("r", ("eos",), "4"))]
