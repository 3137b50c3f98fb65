"""Classifier-free guidance: the mixture is exact, and both lanes advance together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.engine.guidance import guided_logits
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.errors import InvalidRequestError

PROMPT, NEGATIVE = [5, 90, 41, 7, 200], [17, 3, 99]


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Log-softmax in float64."""
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_mixture_by_hand() -> None:
    """The mixture is log n + scale * (log p - log n); a token masked on either side stays masked."""
    p, n = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert guided_logits(p, n, 2) == pytest.approx([np.log(1.0), np.log(0.125), np.log(0.25)], abs=1e-6)
    assert guided_logits(p, n, 0) == pytest.approx(n, abs=1e-6)
    masked = guided_logits(np.array([0.0, -np.inf, 1.0]), np.array([0.0, 1.0, 1.0]), 3)
    assert np.isneginf(masked[1])
    assert np.isfinite(masked[[0, 2]]).all()


def test_guided_greedy_is_the_argmax_of_the_mixture(exact_model: LanguageModel) -> None:
    """Each token is the largest of the mixture of the two prompts' rows, with the output so far behind both."""
    got = exact_model.generate(
        PROMPT, negative_prompt=NEGATIVE, guidance_scale=2.5, temperature=0, max_tokens=12, ignore_eos=True
    )
    output: list[int] = []
    for token_id in got.choices[0].token_ids:
        given = exact_model.logits([*PROMPT, *output])[-1]
        unwanted = exact_model.logits([*NEGATIVE, *output])[-1]
        mixed = log_softmax(unwanted) + 2.5 * (log_softmax(given) - log_softmax(unwanted))
        assert token_id == int(mixed[: exact_model.vocab_size].argmax())
        output.append(token_id)


def test_scale_one_is_no_guidance(exact_model: LanguageModel) -> None:
    """At 1 nothing is mixed, and a negative prompt is refused as it could do nothing."""
    knobs = {"seed": 4, "max_tokens": 10, "ignore_eos": True}
    plain = exact_model.generate(PROMPT, **knobs).choices[0].token_ids
    assert exact_model.generate(PROMPT, **knobs, guidance_scale=1.0).choices[0].token_ids == plain
    assert exact_model.generate(PROMPT, **knobs, guidance_scale=4.0).choices[0].token_ids != plain
    with pytest.raises(InvalidRequestError, match="needs a guidance_scale"):
        exact_model.generate(PROMPT, negative_prompt=NEGATIVE)


def test_unset_negative_prompt_is_the_last_token(exact_model: LanguageModel) -> None:
    """As in transformers, the prompt's last token alone is what is turned away from."""
    knobs = {"seed": 4, "max_tokens": 10, "ignore_eos": True, "guidance_scale": 3.0}
    named = exact_model.generate(PROMPT, **knobs, negative_prompt=PROMPT[-1:])
    assert exact_model.generate(PROMPT, **knobs).choices[0].token_ids == named.choices[0].token_ids


def test_chunks_choices_and_preemption_change_nothing(tiny_folder: Path, exact_model: LanguageModel) -> None:
    """Guided choices give the same tokens however the prefill is cut and however short the memory is."""
    knobs = {"seed": 4, "max_tokens": 20, "ignore_eos": True, "guidance_scale": 3.0, "n": 3}
    prompts = {"prompt": PROMPT * 4, "negative_prompt": NEGATIVE * 9}
    expected = [c.token_ids for c in exact_model.generate(**prompts, **knobs).choices]
    limits = EngineLimits(max_prefill_tokens=3, max_kv_bytes=exact_model.kv_bytes_for(64) * 3)
    with LanguageModel.load(tiny_folder, numerics="reproducible", engine_limits=limits) as model:
        assert [c.token_ids for c in model.generate(**prompts, **knobs).choices] == expected
        assert model.engine.load().kv_cache_bytes == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 101}, "guidance_scale"),
        ({"guidance_scale": True}, "guidance_scale"),
        ({"guidance_scale": 2, "negative_prompt": [9999]}, "negative_prompt[0]"),
        ({"guidance_scale": 2, "negative_prompt": [5] * 200}, "negative_prompt"),
    ],
)
def test_wrong_guidance_names_the_field(model: LanguageModel, options: dict, field: str) -> None:
    """Scale and negative prompt are checked as every field is."""
    with pytest.raises(InvalidRequestError) as caught:
        model.generate([5], **options)
    assert caught.value.violations[0].field == field
