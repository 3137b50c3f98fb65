"""The entry point of the distribution."""

from __future__ import annotations

from collections.abc import Callable

from treadle_plugin_api import Select, Stage, hookimpl

import treadle_samplers as stages

# In the order in which equal kinds run by default; temperature, top_k, top_p and min_p come first of theirs.
STAGES: tuple[type[Stage | Select], ...] = (
    stages.AllowedTokenIds,
    stages.SuppressTokens,
    stages.BadWords,
    stages.MinTokens,
    stages.NoRepeatNgram,
    stages.LogitBias,
    stages.Penalties,
    stages.Dry,
    stages.Temperature,
    stages.TopK,
    stages.TopP,
    stages.MinP,
    stages.TopA,
    stages.TopNSigma,
    stages.PLess,
    stages.TailFree,
    stages.TypicalP,
    stages.TopH,
    stages.EpsilonCutoff,
    stages.EtaCutoff,
    stages.Xtc,
    stages.Categorical,
    stages.Greedy,
    stages.Mirostat,
    stages.AdaptiveP,
)


@hookimpl
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Register every built-in stage."""
    for stage in STAGES:
        register(stage)
