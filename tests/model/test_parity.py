"""Agreement with the reference outputs of tests/golden (transformers, float32, eager attention)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Batch
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.decoder import Decoder

MODELS = (
    "gpt2",
    "gpt2_hub_layout",
    "llama_bias_headdim",
    "llama_mqa_bf16",
    "llama_plain",
    "llama_rope_llama3",
    "llama_sharded",
    "llama_tied_gqa",
)
OPTIONS = ({}, {"numerics": "reproducible"}, {"dtype": "float64"})


def full_logits(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Return `[tokens, vocab]` of one pass without a cache."""
    return decoder.head(decoder.forward(Batch.of([ids])))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_reference(load_decoder, parity, name, length, options):
    """Logits are within 1e-4 of the reference at every position."""
    expected = parity(name)
    logits = full_logits(load_decoder(name, **options), expected[f"ids_{length}"])
    np.testing.assert_allclose(logits, expected[f"logits_{length}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_agree_with_the_reference(load_decoder, parity, name):
    """24 tokens decoded one at a time through a cache are the reference's."""
    decoder, expected = load_decoder(name), parity(name)
    cache, ids, chosen = decoder.new_cache(), expected["ids_5"], []
    for _ in range(len(expected["greedy_ids"])):
        hidden = decoder.forward(Batch.of([ids], [cache.length]), [cache])
        chosen.append(int(decoder.head(hidden[-1:])[0].argmax()))
        ids = [chosen[-1]]
    assert chosen == expected["greedy_ids"].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_both_config_spellings_describe_the_same_decoder(golden, tmp_path, name):
    """The transformers 4 spelling of config.json gives the very DecoderConfig of the transformers 5 one."""
    folder = tmp_path / name
    shutil.copytree(golden / "models" / name, folder)
    shutil.copyfile(folder / "config.v4.json", folder / "config.json")
    with load_checkpoint(folder) as old, load_checkpoint(golden / "models" / name) as new:
        assert old.config == new.config


def test_linear_rotary_scaling_divides_positions(golden: Path):
    """With factor 2 the keys and queries at position 2p are those of position p without scaling."""
    from treadle_plugin_api.decoder_config import RotaryConfig
    from treadle_server.model.ops import rotary_frequencies

    plain = rotary_frequencies(RotaryConfig(theta=100.0), 8)
    scaled = rotary_frequencies(RotaryConfig(kind="linear", theta=100.0, factor=2.0), 8)
    np.testing.assert_array_equal(scaled * 2, plain)
