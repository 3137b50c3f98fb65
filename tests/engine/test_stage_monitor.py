"""What is noticed of stages that are slow, or that fail at treating rows together."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
from treadle_plugin_api import Stage
from treadle_samplers.greedy import Greedy
from treadle_server.engine import stage_monitor
from treadle_server.engine.chain import SamplingChain, StageSpec, sample_rows
from treadle_server.engine.stage_monitor import StageMonitor
from treadle_server.language_model.preview import bare_model_info
from treadle_server.plugins.registry import StageEntry, StageRegistry


class Slow(Stage):
    """Sleep over rows that begin with a one."""

    name = "slow"
    kind = "transform"

    def apply(self, logits, context, state=None):
        """Sleep, or do not."""
        if logits[0] == 1:
            time.sleep(0.02)
        return logits


class Batched(Slow):
    """Have a batch way that raises."""

    name = "batched"

    @classmethod
    def apply_batch(cls, stages, logits, contexts, states):
        """Raise."""
        raise RuntimeError("not today")


def sample(
    monitor: StageMonitor, stage: type[Stage], first: float = 1.0, num_rows: int = 1, built_in: bool = False
) -> list[object]:
    """Outcomes of rows through the stage, then greedy."""
    entries = [
        StageEntry(cls=cls, plugin="p", distribution="d", version="1", built_in=built_in) for cls in (stage, Greedy)
    ]
    stages = [StageSpec(cls.name) for cls in (stage, Greedy)]
    chain = SamplingChain.resolve(
        StageRegistry(entries), explicit={}, defaults={}, stages=stages, model_info=bare_model_info(3)
    )
    logits = np.array([[first, 0, 2]] * num_rows, dtype=np.float32)
    return sample_rows([chain.begin([1], seed=0) for _ in range(num_rows)], logits, monitor=monitor)


def test_slow_calls_are_counted_by_stage():
    """Only calls over the limit count, and the row is served all the same."""
    monitor = StageMonitor(0.01)
    assert [outcome.token_id for outcome in sample(monitor, Slow, num_rows=2)] == [2, 2]
    sample(monitor, Slow, first=0.0)
    assert monitor.num_slow_calls == {"slow": 2}


def test_slow_calls_are_logged_once_a_minute(monkeypatch, caplog: pytest.LogCaptureFixture):
    """A stage that is slow for every token does not fill the log."""
    monitor = StageMonitor(0.01)
    now = [1000.0]
    monkeypatch.setattr(stage_monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with caplog.at_level(logging.WARNING):
        for moment in (1000.0, 1001.0, 1059.0, 1061.0, 1062.0):
            now[0] = moment
            sample(monitor, Slow)
    assert len(caplog.records) == 2
    assert "stage slow of plugin p took 0.02" in caplog.messages[0]
    assert "exceeded once" in caplog.messages[0]
    assert "exceeded 4 times" in caplog.messages[1]


def test_a_slow_built_in_stage_is_no_warning(caplog: pytest.LogCaptureFixture):
    """Nobody who generates text can mend it."""
    with caplog.at_level(logging.INFO):
        sample(StageMonitor(0.01), Slow, built_in=True)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_nothing_is_slow_without_a_limit():
    """Previews and tests do not care."""
    monitor = StageMonitor()
    sample(monitor, Slow)
    assert monitor.num_slow_calls == {}


def test_a_batch_that_raises_is_logged_once(caplog: pytest.LogCaptureFixture):
    """Its author learns of it at the usual log level; the rows are served one by one."""
    monitor = StageMonitor()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert len(sample(monitor, Batched, first=0.0, num_rows=2)) == 2
    assert caplog.messages == [
        "apply_batch of stage batched of plugin p raised RuntimeError: not today; its rows are run one by one"
    ]
