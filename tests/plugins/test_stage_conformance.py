"""Every built-in stage passes the suite that authors use, over the whole range of its parameters."""

import pytest
import treadle_samplers as samplers
from treadle_plugin_api.testing import check_stage
from treadle_samplers.plugin import STAGES

CASES = [
    *((samplers.MinP, {"min_p": value}) for value in (1e-9, 0.05, 1)),
    *((samplers.TopA, {"top_a": value}) for value in (1e-9, 0.2, 1)),
    *((samplers.TopNSigma, {"top_n_sigma": value}) for value in (0.01, 1, 1e300)),
    (samplers.PLess, {}),
    (samplers.PLess, {"p_less": False}),
    *((samplers.EpsilonCutoff, {"epsilon_cutoff": value}) for value in (1e-300, 3e-4, 1)),
    *((samplers.EtaCutoff, {"eta_cutoff": value}) for value in (1e-300, 3e-4, 1)),
    *((samplers.TypicalP, {"typical_p": value}) for value in (1e-9, 0.2, 0.95, 1)),
    *((samplers.TopH, {"top_h": value}) for value in (1e-9, 0.4, 1)),
    *((samplers.TailFree, {"tfs": value}) for value in (1e-9, 0.4, 0.95, 1)),
    *((samplers.Xtc, {"xtc_probability": p, "xtc_threshold": t}) for p in (1e-9, 0.5, 1) for t in (0, 0.1, 0.5)),
    *((samplers.Temperature, {"temperature": t, "dynatemp_range": r}) for t in (0, 0.5, 2) for r in (0.5, 1e300)),
    (samplers.Temperature, {"temperature": 1e308, "dynatemp_range": 1e308}),
    *((samplers.Temperature, {"dynatemp_range": 1, "dynatemp_exponent": value}) for value in (0, 0.3, 100)),
    (samplers.Penalties, {}),
    *((samplers.Penalties, {"repetition_penalty": value}) for value in (1e-300, 0.7, 1.3, 1e300)),
    (samplers.Penalties, {"presence_penalty": 2, "frequency_penalty": -2}),
    (samplers.Dry, {}),
    (samplers.Dry, {"dry_allowed_length": 1, "dry_sequence_breakers": []}),
    (samplers.Dry, {"dry_base": 1, "dry_multiplier": 1000, "dry_allowed_length": 1}),
    (samplers.Dry, {"dry_sequence_breakers": ["bc"], "dry_sequence_breaker_ids": [0]}),
    *((samplers.NoRepeatNgram, {"no_repeat_ngram_size": value}) for value in (1, 2, 3, 2**31 - 1)),
    (samplers.LogitBias, {}),
    (samplers.LogitBias, {"logit_bias": {"0": -100, "5": 100.0}}),
    (samplers.AllowedTokenIds, {}),
    (samplers.AllowedTokenIds, {"allowed_token_ids": [5, 0, 5, 7]}),
    (samplers.SuppressTokens, {}),
    (samplers.SuppressTokens, {"suppress_tokens": [0, 1]}),
    (samplers.BadWords, {}),
    (samplers.BadWords, {"bad_words": ["b", "ab"], "bad_words_token_ids": [[2, 3], [9]]}),
    *((samplers.Mirostat, {"mirostat": v, "mirostat_tau": t}) for v in (1, 2) for t in (0, 1, 5, 100)),
    *((samplers.Mirostat, {"mirostat_eta": value}) for value in (0, 1)),
    *((samplers.AdaptiveP, {"adaptive_target": t, "adaptive_decay": d}) for t in (0, 0.5, 1) for d in (0, 0.99)),
]


@pytest.mark.parametrize(("cls", "parameters"), CASES)
def test_conforms(cls: type, parameters: dict):
    """The suite finds nothing, at either end of each range and between."""
    check_stage(cls, **parameters)


def test_every_stage_is_registered():
    """A class that is exported is also a stage of the plugin."""
    assert {cls.__name__ for cls in STAGES} >= set(samplers.__all__)
