"""The knobs of the samplers over the wire and in process: the same values give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from treadle_client import Client
from treadle_server import LanguageModel

PROMPT = [5, 90, 41, 7, 200, 5, 90]
KNOBS: list[dict[str, object]] = [
    {"min_p": 0.05, "repetition_penalty": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"logit_bias": {5: 3.0, 90: -100}, "presence_penalty": 0.5, "frequency_penalty": 0.25, "dynatemp_range": 0.5},
    {"allowed_token_ids": [5, 6, 7, 8, 9], "suppress_tokens": [7], "no_repeat_ngram_size": 3, "top_n_sigma": 3.0},
    {"bad_words": ["a", "th"], "bad_words_token_ids": [[5, 90], [8]], "typical_p": 0.9, "tfs": 0.99},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["x"], "dry_sequence_breaker_ids": [3]},
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    {"mirostat": 2, "top_k": 50},
    {"adaptive_target": 0.3, "adaptive_decay": 0.8, "min_p": 0.02},
    {"p_less": True, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "top_a": 1e-3, "top_h": 0.9},
]


@pytest.fixture(scope="module")
def local(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The model that the server serves, in this process."""
    with LanguageModel.load(tiny_folder, numerics="reproducible") as model:
        yield model


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: next(iter(knobs)))
def test_server_and_in_process_give_the_same(client: Client, local: LanguageModel, knobs: dict) -> None:
    """Every kind of knob means the same both ways, and the values in force come back."""
    wire = client.generate(PROMPT, model="tiny", seed=6, max_tokens=24, token_ids=True, ignore_eos=True, **knobs)
    here = local.generate(PROMPT, seed=6, max_tokens=24, ignore_eos=True, **knobs)
    assert wire.choices[0].token_ids == here.choices[0].token_ids
    assert wire.prompt_info is not None
    in_force = wire.prompt_info.knobs
    assert {name: in_force[name] for name in knobs if name != "logit_bias"} == {
        name: value for name, value in knobs.items() if name != "logit_bias"
    }
    assert in_force["logit_bias"] == {str(key): value for key, value in knobs.get("logit_bias", {}).items()}


def test_lists_bind(local: LanguageModel) -> None:
    """What is banned does not come, and nothing but what is allowed does."""

    def ids(**knobs: object) -> set[int]:
        choice = local.generate(PROMPT, seed=1, max_tokens=40, ignore_eos=True, temperature=3.0, **knobs).choices[0]
        return set(choice.token_ids)

    assert ids(allowed_token_ids=[5, 6, 7], suppress_tokens=[6]) == {5, 7}
    assert not ids(suppress_tokens=list(range(250))) & set(range(250))
    assert ids(logit_bias={5: 100.0}) == {5}
    stream = local.stream(PROMPT, min_p=0.05, logit_bias={5: -100.0}, seed=2, max_tokens=20)
    assert 5 not in [token_id for event in stream for token_id in getattr(event, "token_ids", ())]


def test_bad_words_do_not_come(local: LanguageModel) -> None:
    """The text is without the words, in any tokens the model had for them."""
    free = local.generate("hello", seed=3, max_tokens=60, temperature=2.0, ignore_eos=True).text
    word = next(letter for letter in free if letter.isalpha())
    text = local.generate("hello", seed=3, max_tokens=60, temperature=2.0, ignore_eos=True, bad_words=[word]).text
    single = local.tokenizer.encode(word, add_special_tokens=False)
    assert len(single) == 1
    assert single[0] not in local.tokenizer.encode(text, add_special_tokens=False)


def test_generation_config_brings_numbers_of_these_names(tmp_path: Path, tiny_folder: Path) -> None:
    """Numbers are the model's defaults; wrong ones and lists are passed over."""
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"repetition_penalty": 1.1, "typical_p": 0.9, "min_p": 7, "no_repeat_ngram_size": 3, "suppress_tokens": [1],'
        ' "do_sample": true, "top_h": null, "epsilon_cutoff": 0.0}',
        encoding="utf-8",
    )
    with LanguageModel.load(tmp_path) as model:
        chain = [stage.name for stage in model.generate(PROMPT, max_tokens=1).prompt_info.chain]
        assert chain == ["no_repeat_ngram", "penalties", "typical_p", "categorical"]
        assert "min_p" not in model.default_knobs
        free = model.generate(PROMPT, max_tokens=1, use_model_defaults=False).prompt_info.chain
        assert [stage.name for stage in free] == ["categorical"]
