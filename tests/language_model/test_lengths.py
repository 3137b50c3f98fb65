"""Models whose angles depend on the length, through the engine: prompts in chunks, several choices, preemption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.model.kv_cache import KVCache

CROSSING = ["llama_rope_dynamic", "llama_rope_longrope", "phi3_longrope"]


@pytest.mark.parametrize("prefill", [2, 256])
@pytest.mark.parametrize("name", CROSSING)
def test_greedy_tokens_past_the_limit_are_those_of_cached_decoding(golden: Path, name: str, prefill: int) -> None:
    """Tokens that cross the limit are the reference's, however small the prompt's chunks are."""
    reference = np.load(golden / "parity" / f"{name}.npz")
    limits = EngineLimits(max_prefill_tokens=prefill)
    with LanguageModel.load(golden / "models" / name, engine_limits=limits) as model:
        result = model.generate(reference["ids_5"].tolist(), temperature=0, max_tokens=24, ignore_eos=True, n=2)
    for choice in result.choices:
        assert list(choice.token_ids) == reference["greedy_cached_ids"].tolist()


@pytest.mark.parametrize("name", CROSSING)
def test_preempted_sequences_take_up_the_angles_that_they_had(golden: Path, name: str) -> None:
    """With memory for one and a half sequences, choices that are put back and read again end the same."""
    reference = np.load(golden / "parity" / f"{name}.npz")
    with LanguageModel.load(golden / "models" / name) as model:
        room = KVCache.bytes_for(model.config, model.decoder.dtype, 128)
    limits = EngineLimits(max_kv_bytes=room, max_prefill_tokens=3)
    with LanguageModel.load(golden / "models" / name, engine_limits=limits) as model:
        result = model.generate(reference["ids_5"].tolist(), temperature=0, max_tokens=24, ignore_eos=True, n=4)
    for choice in result.choices:
        assert list(choice.token_ids) == reference["greedy_cached_ids"].tolist()
