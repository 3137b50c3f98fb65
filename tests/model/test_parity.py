"""Agreement with the reference outputs of tests/golden (transformers, float32, eager attention)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Batch
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.decoder import Decoder

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = tuple(sorted(path.stem for path in (GOLDEN / "parity").glob("*.npz")))
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
    """24 tokens decoded one at a time through a cache are those that the reference decodes through one."""
    decoder, expected = load_decoder(name), parity(name)
    cache, ids, chosen = decoder.new_cache(), expected["ids_5"], []
    for _ in range(len(expected["greedy_cached_ids"])):
        hidden = decoder.forward(Batch.of([ids], [cache.length], [len(expected["ids_5"])]), [cache])
        chosen.append(int(decoder.head(hidden[-1:])[0].argmax()))
        ids = [chosen[-1]]
    assert chosen == expected["greedy_cached_ids"].tolist()


CROSSING = tuple(name for name in MODELS if "cached_ids" in np.load(GOLDEN / "parity" / f"{name}.npz"))


@pytest.mark.parametrize("chunk", [1, 7, 30])
@pytest.mark.parametrize(("prompt", "logits"), [(0, "cached_logits"), (1, "cached_logits_long_prompt")])
@pytest.mark.parametrize("name", CROSSING)
def test_angles_that_depend_on_the_length_agree_with_cached_decoding(load_decoder, parity, name, prompt, logits, chunk):
    """Past the limit, prompts cut anywhere and then single tokens give what the reference's cached decoding gives."""
    decoder, expected = load_decoder(name), parity(name)
    ids, num_prompt = expected["cached_ids"], int(expected["cached_prompts"][prompt])
    cache, rows = decoder.new_cache(), []
    while cache.length < len(ids):
        count = min(chunk, num_prompt - cache.length) if cache.length < num_prompt else 1
        piece = ids[cache.length : cache.length + count]
        rows.append(decoder.head(decoder.forward(Batch.of([piece], [cache.length], [num_prompt]), [cache])))
    np.testing.assert_allclose(np.concatenate(rows), expected[logits], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CROSSING)
def test_a_sequence_that_is_read_again_keeps_the_angles_of_each_token(load_decoder, parity, name):
    """Prompt and answer fed at once, as after a preemption, equal prompt first and answer token by token."""
    decoder, expected = load_decoder(name), parity(name)
    num_prompt = int(expected["cached_prompts"][0])
    hidden = decoder.forward(Batch.of([expected["cached_ids"]], [0], [num_prompt]))
    np.testing.assert_allclose(decoder.head(hidden), expected["cached_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_both_config_spellings_describe_the_same_decoder(golden, tmp_path, name):
    """The transformers 4 spelling of config.json gives the very DecoderConfig of the transformers 5 one."""
    folder = tmp_path / name
    shutil.copytree(golden / "models" / name, folder)
    shutil.copyfile(folder / "config.v4.json", folder / "config.json")
    with load_checkpoint(folder) as old, load_checkpoint(golden / "models" / name) as new:
        assert old.config == new.config
