"""What users of other servers have reported as faults, where no other test pins the right behaviour.

tests/soak/README.md has the table of all reports; numbers in the docstrings are its rows.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_client import Client, InvalidArgumentError, QueueFullError
from treadle_server import LanguageModel
from treadle_server.config import ServerConfig
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.service.embedded import embedded_server

PROMPT = [5, 90, 41]


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Client]:
    """Serve a folder in reproducible mode, and lend a client."""
    config = ServerConfig(port=0, numerics="reproducible", grace_s=0, **settings)
    with embedded_server([f"tiny={folder}"], config) as target, Client(target, timeout_s=30, retries=0) as client:
        yield client


@pytest.fixture
def changed(tiny_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the tiny model with other values in some of its JSON files."""

    def copy(**files: dict[str, Any]) -> Path:
        folder = shutil.copytree(tiny_folder, tmp_path / "model")
        for stem, values in files.items():
            file = folder / f"{stem}.json"
            held = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(held | values))
        return folder

    return copy


@pytest.fixture
def pair(client: Client) -> tuple[int, str]:
    """A token of two characters or more that are all ASCII letters, and its text."""
    for token_id in range(256, 299):
        text = client.detokenize([token_id], model="tiny")
        if len(text) > 1 and text.isascii() and text.isalpha() and len(set(text)) == len(text):
            return token_id, text
    raise AssertionError("the tiny model has no such token")


def test_token_ids_never_wait_for_the_rest_of_a_character(client: Client) -> None:
    """1, 2: each id comes with its own step; the text of a character comes whole, with its last byte."""
    ids = [token.id for token in client.tokenize("猫", model="tiny", add_special_tokens=False)]
    assert len(ids) > 1
    forced = {"stages": [("grammar", {"regex": "猫猫猫"})], "max_tokens": 3 * len(ids), "token_ids": True}
    with client.stream(PROMPT, model="tiny", **forced) as stream:
        chunks = [chunk for chunk in stream if chunk.token_ids]
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 3 * len(ids)
    assert [chunk.text for chunk in chunks] == [*[""] * (len(ids) - 1), "猫"] * 3


def test_every_path_has_one_detokenizer(client: Client) -> None:
    """3, 11: many choices in one batch, streamed or not, are the decoded ids, special tokens and all."""
    knobs = {"model": "tiny", "n": 8, "seed": 3, "max_tokens": 40, "token_ids": True, "special_tokens": True}
    choices = client.generate(PROMPT, **knobs).choices
    with client.stream(PROMPT, **knobs) as stream:
        list(stream)
    for choice, streamed in zip(choices, stream.texts, strict=True):
        shown = choice.token_ids[:-1] if choice.finish.reason == "eos" else choice.token_ids
        assert streamed == choice.text == client.detokenize(list(shown), model="tiny", special_tokens=True)


def test_a_stop_string_inside_a_token_trims_the_text_alone(client: Client, pair: tuple[int, str]) -> None:
    """10, 11: the ids keep the token in which the match ends, with a prompt of ids and ids asked for."""
    token_id, text = pair
    forced = {"allowed_token_ids": [token_id], "max_tokens": 5, "token_ids": True}
    choice = client.generate(PROMPT, model="tiny", stop=text[1], **forced).choices[0]
    assert (choice.text, choice.token_ids, choice.finish.reason) == (text[0], (token_id,), "stop_string")


def test_every_end_of_sequence_ends_the_text(changed: Callable[..., Path]) -> None:
    """12: those of the configuration, of generation_config and of the tokenizer count together."""
    folder = changed(config={"eos_token_id": 9}, generation_config={"eos_token_id": [7, 11]})
    with serving(folder) as client:
        assert client.get_model().eos_token_ids == (2, 7, 9, 11)
        for token_id in (2, 7, 9, 11):
            finish = client.generate(PROMPT, allowed_token_ids=[token_id], max_tokens=3).choices[0].finish
            assert (finish.reason, finish.eos_token_id, finish.usage.num_generated_tokens) == ("eos", token_id, 1)


def test_ends_of_the_model_and_of_the_user_stay_apart(client: Client) -> None:
    """13: `ignore_eos` passes over the model's, whatever the user's are, and never over the user's."""
    forced = {"model": "tiny", "allowed_token_ids": [2], "max_tokens": 3, "ignore_eos": True}
    assert client.generate(PROMPT, stop_token_ids=[77], **forced).choices[0].finish.reason == "max_tokens"
    assert client.generate(PROMPT, stop_token_ids=[2], **forced).choices[0].finish.reason == "stop_token"


def test_min_tokens_counts_what_is_generated_alone(changed: Callable[..., Path]) -> None:
    """14: with a long prompt, several ends and stop strings, exactly `min_tokens` come before the first end."""
    folder = changed(generation_config={"eos_token_id": [2, 7, 11]})
    wanted = {"logit_bias": {2: 100.0, 7: 99.0, 11: 98.0}, "min_tokens": 4, "max_tokens": 20, "stop_token_ids": [50]}
    with serving(folder) as client:
        usage = client.generate([5] * 60, temperature=0, **wanted).choices[0].finish.usage
        assert usage.num_generated_tokens == 5  # four, and the end itself


@pytest.mark.parametrize(
    ("reason", "knobs"),
    [
        ("eos", {"allowed_token_ids": [2]}),
        ("stop_token", {"allowed_token_ids": [9], "stop_token_ids": [9]}),
        ("stop_string", {"stages": [("grammar", {"regex": "(ab)+"})], "stop": "ab", "max_tokens": 8}),
        ("max_tokens", {"max_tokens": 2, "ignore_eos": True}),
        ("context_full", {"ignore_eos": True}),
    ],
)
def test_both_modes_end_alike(client: Client, reason: str, knobs: dict[str, Any]) -> None:
    """15, 16: one terminal message for each choice, its reason the same as without streaming; then the stream ends."""
    finishes = [choice.finish for choice in client.generate(PROMPT, model="tiny", n=2, seed=1, **knobs).choices]
    with client.stream(PROMPT, model="tiny", n=2, seed=1, **knobs) as stream:
        told = sorted((chunk.index, chunk.finish) for chunk in stream if chunk.finish)
    assert [finish.reason for finish in finishes] == [reason, reason]
    assert [(i, f.reason, f.usage.num_generated_tokens) for i, f in told] == [
        (i, reason, f.usage.num_generated_tokens) for i, f in enumerate(finishes)
    ]


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"top_k": -1, "top_p": 1.0}])
def test_every_way_to_say_off_travels(client: Client, off: dict[str, Any]) -> None:
    """20, 22, 23: a knob's default, and -1, can be sent and change nothing."""
    knobs = {"model": "tiny", "seed": 5, "max_tokens": 12, "token_ids": True}
    assert (
        client.generate(PROMPT, **knobs, **off).choices[0].token_ids
        == client.generate(PROMPT, **knobs).choices[0].token_ids
    )


def test_unset_seeds_differ_over_the_wire(client: Client) -> None:
    """27: eight requests without a seed draw eight, and each is told."""
    answers = [client.generate(PROMPT, model="tiny", max_tokens=16, ignore_eos=True, token_ids=True) for _ in range(8)]
    assert len({answer.prompt_info.seed for answer in answers}) == 8
    assert len({answer.choices[0].token_ids for answer in answers}) == 8
    again = client.generate(
        PROMPT, model="tiny", max_tokens=16, ignore_eos=True, token_ids=True, seed=answers[0].prompt_info.seed
    )
    assert again.choices[0].token_ids == answers[0].choices[0].token_ids


def test_a_finished_choice_says_nothing_more(client: Client) -> None:
    """32: of choices that end at different times each has as many tokens and log-probabilities as it counts."""
    knobs = {"n": 8, "seed": 2, "stop_token_ids": list(range(3, 60)), "max_tokens": 40, "token_ids": True}
    ended: set[int] = set()
    num_tokens, lengths = [0] * 8, {}
    with client.stream(PROMPT, model="tiny", logprobs="raw", **knobs) as stream:
        for chunk in stream:
            assert chunk.index not in ended
            assert len(chunk.logprobs) == len(chunk.token_ids)
            num_tokens[chunk.index] += len(chunk.token_ids)
            if chunk.finish:
                ended.add(chunk.index)
                lengths[chunk.index] = chunk.finish.usage.num_generated_tokens
    assert num_tokens == [lengths[index] for index in range(8)]
    assert len(set(num_tokens)) > 1


def test_scores_of_a_prompt_are_computed_in_slices(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """33: no more rows of logits are in memory than a step computes."""
    with LanguageModel.load(tiny_folder, engine_limits=EngineLimits(max_prefill_tokens=8)) as model:
        rows: list[int] = []
        head = type(model.decoder).head

        def counted(decoder: Any, hidden: np.ndarray) -> Any:
            rows.append(len(hidden))
            return head(decoder, hidden)

        monkeypatch.setattr(type(model.decoder), "head", counted)
        assert len(model.score([5] * 100)) == 100
    assert max(rows) <= 8


def test_an_empty_prompt_without_bos_is_refused(changed: Callable[..., Path]) -> None:
    """34: where the model has nothing to start from, the request fails with its field, and others are served."""
    folder = changed(tokenizer_config={"bos_token": None}, config={"bos_token_id": None})
    with serving(folder) as client:
        assert client.get_model().bos_token_id is None
        for empty in ("", []):
            with pytest.raises(InvalidArgumentError, match=r"text|token_ids|prompt"):
                client.generate(empty)
        assert client.generate(PROMPT, max_tokens=1).choices


def test_max_tokens_beyond_the_room_is_the_room(client: Client) -> None:
    """37: only the prompt is checked against the context; the first message tells the room that is left."""
    answer = client.generate(PROMPT, model="tiny", max_tokens=100_000, ignore_eos=True)
    assert answer.prompt_info.max_tokens == answer.choices[0].finish.usage.num_generated_tokens == 128 - len(PROMPT)
    assert answer.choices[0].finish.reason == "context_full"


def test_a_reader_that_leaves_during_prefill_stops_it(tiny_folder: Path) -> None:
    """40: between two chunks, long before the prompt is read."""
    with serving(tiny_folder, max_prefill_tokens=1, max_prefix_cache_bytes=0) as client:
        streams = [client.stream([5 + i] * 120, max_tokens=1) for i in range(20)]
        while not client.get_load()[0].num_running_sequences:
            time.sleep(0.001)
        for stream in streams:
            stream.close()
        end_s = time.monotonic() + 5
        while (load := client.get_load()[0]).num_running_sequences or load.kv_cache_bytes or load.num_waiting_requests:
            assert time.monotonic() < end_s, load
        assert load.num_generated_tokens < 20


def test_the_queue_is_bounded_by_tokens(tiny_folder: Path, plugin_dir: Path) -> None:
    """41: few requests with much to read are refused at once, with a time to wait; what was accepted finishes."""
    settings = {"max_running": 1, "max_queued_tokens": 150, "plugin_dirs": (plugin_dir,)}
    with serving(tiny_folder, **settings) as client:
        slow = {"stages": [("faulty", {"how": "sleep"})], "ignore_eos": True}
        running = client.stream(PROMPT, max_tokens=60, **slow)
        next(iter(running))
        waiting = client.stream([5] * 100, max_tokens=2)
        while not client.get_load()[0].num_waiting_requests:
            time.sleep(0.001)
        with pytest.raises(QueueFullError) as caught:
            client.generate([5] * 100, max_tokens=1)
        assert caught.value.retry_after_s > 0
        for stream in (running, waiting):
            assert list(stream)[-1].finish.reason == "max_tokens"
