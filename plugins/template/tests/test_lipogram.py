"""The plugin's own tests: they need treadle-plugin-api and pytest, no server and no model."""

import numpy as np
import pytest
from treadle_lipogram import Lipogram
from treadle_plugin_api import ModelInfo, SamplingContext
from treadle_plugin_api.testing import check_stage

TOKENS = (b"", b" the", b" cat", b"Eh", b"\xe7\x8c\xab")  # end of text, two with an e, 猫
LOGITS = np.array([0, 4, 3, 2, 1], dtype=np.float32)


def model_info() -> ModelInfo:
    """A model of those tokens."""
    return ModelInfo(
        name="tiny",
        vocab_size=len(TOKENS),
        context_length=16,
        eos_ids=frozenset([0]),
        token_bytes=lambda token_id: TOKENS[token_id],
        encode=lambda text: [],
    )


def kept(letters: str) -> list[int]:
    """Ids that stay possible without the letters."""
    stage = Lipogram(letters=letters)
    stage.check(model_info())
    after = stage.apply(LOGITS, SamplingContext(vocab_size=len(TOKENS)))
    return np.flatnonzero(after > -np.inf).tolist()


@pytest.mark.parametrize("letters", ["e", "aeiou", "猫"])
def test_keeps_the_contract(letters: str):
    """The conformance suite: alone, in batches, on odd rows, with seeds and clones."""
    check_stage(Lipogram, letters=letters)


@pytest.mark.parametrize(("letters", "expected"), [("e", [0, 2, 4]), ("TH", [0, 4]), ("猫", [0, 1, 2, 3])])
def test_bans_tokens_with_the_letters(letters: str, expected: list[int]):
    """Small and capital letters alike; the end of text is never banned."""
    assert kept(letters) == expected


def test_refuses_spaces():
    """Nearly every token begins with a space; that cannot be meant."""
    with pytest.raises(ValueError, match="must not hold spaces"):
        Lipogram(letters="a e").check(model_info())
