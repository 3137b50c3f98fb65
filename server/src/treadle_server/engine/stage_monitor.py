"""Watches the stages of an engine: which take too long, and which fail at treating rows together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from treadle_server.engine.chain_stages import ResolvedStage

_LOG = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


class StageMonitor:
    """Counts and logs what stages do wrong without failing. Belongs to the engine thread but for `num_slow_calls`.

    Attributes:
        max_stage_s: how long one stage may take for one row, in seconds: every stream waits for it.
    """

    def __init__(self, max_stage_s: float = float("inf")) -> None:
        self.max_stage_s = max_stage_s
        self._num_slow_calls: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._failed_batches: set[str] = set()

    @property
    def num_slow_calls(self) -> Mapping[str, int]:
        """By stage, how many calls took too long; a moment's view from other threads."""
        return dict(self._num_slow_calls)

    def slow(self, stage: ResolvedStage, took_s: float) -> None:
        """Count a call that took too long, and log it unless the stage was logged within the last minute."""
        self._num_slow_calls[stage.name] += 1
        now = time.monotonic()
        if now - self._logged_s.get(stage.name, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[stage.name] = now
            # Whoever runs treadle can mend a plugin of their own; a built-in stage is slow where the machine is busy.
            _LOG.log(
                logging.INFO if stage.entry.built_in else logging.WARNING,
                "stage %s of plugin %s took %.3f s for a row; the limit is %.3f s, exceeded %s so far",
                stage.name, stage.plugin, took_s, self.max_stage_s, _times(self._num_slow_calls[stage.name]),
            )  # fmt: skip

    def batch_failed(self, stage: ResolvedStage, reason: str) -> None:
        """Log, once a stage, that its rows are run one by one."""
        if stage.name not in self._failed_batches:
            self._failed_batches.add(stage.name)
            _LOG.warning(
                "apply_batch of stage %s of plugin %s %s; its rows are run one by one", stage.name, stage.plugin, reason
            )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
