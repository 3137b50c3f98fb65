"""Greedy selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from treadle_plugin_api import Logits, SamplingContext, Select, keep
from treadle_plugin_api.logits import Ids


class Greedy(Select):
    """Choose the token with the largest logit; of equal ones the lowest id.

    Formula: argmax l. A plain `temperature` of 0 chooses it too. Its distribution is one-hot.
    """

    name = "greedy"
    api_version = 1

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the largest logit."""
        return int(logits.argmax())

    def distribution(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The chosen token keeps its logit, every other is masked."""
        return keep(logits, np.array([logits.argmax()]), context.empty())

    @classmethod
    def apply_batch(
        cls, stages: Sequence[Self], logits: Logits, contexts: Sequence[SamplingContext], states: Sequence[Any]
    ) -> Ids:
        """One call over all rows."""
        ids: Ids = logits.argmax(axis=1)
        return ids
