"""Wrong requests are refused with field, value and range, and the model serves on."""

from __future__ import annotations

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.errors import InvalidRequestError, TreadleError

NAN, INF = float("nan"), float("inf")

# Keywords of the request, the field that the error names, and a part of its message.
WRONG = [
    ({"prompt": [300]}, "prompt[0]", "token id 300 is outside the vocabulary [0, 299)"),
    ({"prompt": [1, -1]}, "prompt[1]", "-1"),
    ({"prompt": [True]}, "prompt[0]", "must be an integer, got True"),
    ({"prompt": [1.0]}, "prompt[0]", "must be an integer, got 1.0"),
    ({"prompt": 5}, "prompt", "must be a text, a list of token ids or a list of messages"),
    ({"prompt": ["a", {"role": "user", "content": "b"}]}, "prompt", "must be all token ids or all messages"),
    ({"prompt": [{"role": "user"}]}, "prompt[0]", '"role" and "content"'),
    ({"prompt": "\ud800"}, "prompt", "not valid Unicode"),
    ({"prompt": [5] * 128}, "prompt", "has 128 tokens"),
    ({"prompt": "x" * 5_000_000}, "prompt", "tokens; there is room for 127"),
    ({"max_tokens": 0}, "max_tokens", "must be in [1, 2147483647], got 0"),
    ({"max_tokens": -1}, "max_tokens", "got -1"),
    ({"max_tokens": 2**40}, "max_tokens", "got 1099511627776"),
    ({"max_tokens": True}, "max_tokens", "must be an integer, got True"),
    ({"max_tokens": 2.0}, "max_tokens", "must be an integer, got 2.0"),
    ({"min_tokens": -1}, "min_tokens", "got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "must not exceed max_tokens (4), got 5"),
    ({"n": 0}, "n", "must be in [1, 128], got 0"),
    ({"n": 10**9}, "n", "got 1000000000"),
    ({"seed": -1}, "seed", "must be in [0, 18446744073709551615], got -1"),
    ({"seed": 2**64}, "seed", "got 18446744073709551616"),
    ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
    ({"stop": [b"a"]}, "stop[0]", "must be a text"),
    ({"stop": ["a"] * 65}, "stop", "at most 64 entries, got 65"),
    ({"stop": ["a" * 5000]}, "stop[0]", "at most 1024 characters, got 5000"),
    ({"stop": ["\ud800"]}, "stop[0]", "not valid Unicode"),
    ({"stop": 5}, "stop", "must be a list, got 5"),
    ({"stop_token_ids": 5}, "stop_token_ids", "must be a list, got 5"),
    ({"order": 5}, "order", "must be a list, got 5"),
    ({"order": ["greedy"] * 65}, "order", "at most 64 entries, got 65"),
    ({"stages": ["top_k"] * 65}, "stages", "at most 64 entries, got 65"),
    ({"max_tokens": 10**5000}, "max_tokens", "an integer of 16610 bits"),
    ({"prompt": [5] * 10_000}, "prompt", "has 10000 tokens; there is room for 127: the model's context is 128"),
    ({"stop_token_ids": [300]}, "stop_token_ids[0]", "outside the vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "outside the vocabulary"),
    ({"num_top_logprobs": 129, "logprobs": "raw"}, "num_top_logprobs", "must be in [0, 128], got 129"),
    ({"num_top_logprobs": -1, "logprobs": "raw"}, "num_top_logprobs", "got -1"),
    ({"num_top_logprobs": 3}, "num_top_logprobs", "needs logprobs"),
    ({"ignore_eos": 1}, "ignore_eos", "must be true or false, got 1"),
    ({"preset": "nope"}, "preset", "creative"),
    ({"adapter": "nope"}, "adapter", "'nope'"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": NAN}, "temperature", "nan"),
    ({"temperature": INF}, "temperature", "inf"),
    ({"temperature": True}, "temperature", "True"),
    ({"temperature": "0.5"}, "temperature", "'0.5'"),
    ({"temperature": np.float32(0.5)}, "temperature", "0.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 2.5}, "top_k", "2.5"),
    ({"top_k": True}, "top_k", "True"),
    ({"top_p": 0.0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_p": NAN}, "top_p", "nan"),
    ({"min_p": NAN}, "min_p", "must be a number above 0 and at most 1, or 0.0 for off; received nan"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be a number above 0; received 0"),
    ({"logit_bias": {299: 1.0}}, "logit_bias.299", "must be a token id from 0 to 298; received 299"),
    ({"logit_bias": {5: INF}}, "logit_bias.5", "inf"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
    ({"suppress_tokens": [5, 299]}, "suppress_tokens[1]", "received 299"),
    ({"bad_words": ["a", ""]}, "bad_words[1]", "at least 1 character"),
    ({"bad_words_token_ids": [[5], [299]]}, "bad_words_token_ids[1][0]", "received 299"),
    ({"mirostat": 2, "adaptive_target": 0.5}, "adaptive_target", "second select"),
    ({"stages": ["no_such_stage"]}, "stages[0].name", "no_such_stage"),
    ({"stages": [("top_k", {"nope": 1})]}, "stages[0].parameters.nope", "its parameters: top_k"),
    ({"stages": [("top_k", {"top_k": 3.0})]}, "stages[0].parameters.top_k", "3.0"),
    ({"stages": [("top_k", {"top_k": True})]}, "stages[0].parameters.top_k", "True"),
    ({"stages": [("top_p", {"top_p": "x"})]}, "stages[0].parameters.top_p", "'x'"),
    ({"stages": ["greedy", "categorical"]}, "stages[1]", "select"),
    ({"order": ["top_k", "top_k"], "top_k": 3}, "order[1]", "top_k"),
    ({"order": ["nope"]}, "order[0]", "nope"),
    ({"order": ["temperature"], "top_k": 3, "temperature": 0.5}, "order", "top_k"),
]


@pytest.mark.parametrize(("keywords", "field", "message"), WRONG, ids=[field for _, field, _ in WRONG])
def test_wrong_field_is_named(model: LanguageModel, keywords: dict, field: str, message: str) -> None:
    """The error names the field, and its message the value and what was expected."""
    request = {"prompt": [5, 6], **keywords}
    with pytest.raises(InvalidRequestError) as caught:
        model.generate(request.pop("prompt"), **request)
    found = {v.field: v.message for v in caught.value.violations}
    assert field in found
    assert message in found[field]


def test_every_wrong_field_is_named_at_once(model: LanguageModel) -> None:
    """A request with several faults is told all of them."""
    with pytest.raises(InvalidRequestError) as caught:
        model.generate([5], max_tokens=0, n=0, stop=[""])
    assert {v.field for v in caught.value.violations} == {"max_tokens", "n", "stop[0]"}


def test_unknown_keyword_suggests_the_nearest(model: LanguageModel) -> None:
    """A misspelt keyword is a TypeError that names the nearest known one."""
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        model.generate([5], temprature=0.5)


def test_empty_prompt_starts_from_bos(model: LanguageModel) -> None:
    """An empty text or list becomes BOS where the model has one."""
    assert model.generate("", max_tokens=1).prompt_info.prompt_ids == (1,)
    assert model.generate([], max_tokens=1).prompt_info.prompt_ids == (1,)


def test_model_serves_on_after_every_kind_of_error(model: LanguageModel) -> None:
    """After all the refusals the model still answers."""
    for keywords, _, _ in WRONG:
        request = {"prompt": [5], **keywords}
        with pytest.raises(TreadleError):
            model.generate(request.pop("prompt"), **request)
    assert model.generate([5, 6], max_tokens=2, ignore_eos=True).choices[0].finish.num_generated_tokens == 2


def test_word_outside_a_closed_vocabulary_is_refused() -> None:
    """A tokenizer that knows six words names what it cannot read, as the request's fault."""
    with LanguageModel.load("cat-mouse") as model:
        with pytest.raises(InvalidRequestError, match="cannot read"):
            model.generate("hello")
        assert model.generate("猫 追", temperature=0).text == " 老鼠"
