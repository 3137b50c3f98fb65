"""Generation through the real client, over gRPC, from a real server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from treadle_client import AsyncClient, Client, InvalidArgumentError, Message
from treadle_server import LanguageModel

PROMPT = [5, 90, 41, 7, 200]


def wait_until_idle(client: Client) -> None:
    """Wait until no model holds a sequence; fail after five seconds."""
    deadline = time.monotonic() + 5
    while any(load.num_running_sequences or load.num_waiting_requests for load in client.get_load()):
        assert time.monotonic() < deadline, "the server still works on something"
        time.sleep(0.01)


def test_greedy_tokens_are_the_reference_ones(client: Client, golden: Path) -> None:
    """What comes over the wire is what transformers generates."""
    reference = np.load(golden / "parity" / "llama_plain.npz")
    answer = client.generate(
        reference["ids_5"].tolist(), model="tiny", temperature=0, ignore_eos=True, max_tokens=24, token_ids=True
    )
    assert list(answer.choices[0].token_ids) == reference["greedy_ids"].tolist()


def test_stream_and_unary_give_the_same(client: Client) -> None:
    """Streaming or not, a seed gives the same text, ids and reason."""
    knobs = {"model": "tiny", "seed": 4, "max_tokens": 20, "token_ids": True, "temperature": 0.9, "top_p": 0.9}
    unary = client.generate("hello", **knobs).choices[0]
    with client.stream("hello", **knobs) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == unary.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == unary.token_ids
    assert chunks[-1].finish.reason == unary.finish.reason


def test_server_and_in_process_give_the_same(client: Client, tiny_folder: Path) -> None:
    """The in-process API is the model that the server serves."""
    with LanguageModel.load(tiny_folder, numerics="reproducible") as model:
        local = model.generate("hello", seed=6, max_tokens=16)
    assert client.generate("hello", model="tiny", seed=6, max_tokens=16).text == local.text


def test_first_message_tells_the_effective_settings(client: Client) -> None:
    """Knobs in force, the chain, the seed and the limit come before the first token."""
    with client.stream(PROMPT, model="tiny", top_k=3, preset="creative", max_tokens=2) as stream:
        list(stream)
        info = stream.prompt_info
    assert (info.knobs["top_k"], info.knobs["temperature"], info.knobs["top_p"]) == (3, 1.0, 0.95)
    assert [stage.name for stage in info.chain] == ["top_k", "top_p", "categorical"]
    assert (info.num_prompt_tokens, info.max_tokens, info.model, info.weight_version) == (5, 2, "tiny", 1)


def test_messages_go_through_the_chat_template_without_a_second_bos(client: Client) -> None:
    """A conversation is rendered by the template, whose own BOS is the only one a turn gets."""
    answer = client.generate([Message(role="user", content="hi")], model="tiny", max_tokens=1, token_ids=True)
    ids = answer.prompt_info.prompt_token_ids
    text = client.detokenize(list(ids), model="tiny", special_tokens=True)
    assert text == "<s>user: hi</s><s>assistant: "


def test_thirty_two_streams_at_once_give_what_each_gives_alone(target: str, client: Client) -> None:
    """In reproducible mode nothing depends on what else runs, prompts of every length mixed."""
    requests = [
        {"prompt": [(11 * i + j) % 290 + 3 for j in range(1 + 3 * i)], "seed": i, "max_tokens": 5 + i % 20}
        for i in range(32)
    ]

    async def together() -> list[str]:
        async with AsyncClient(target, timeout_s=60) as many:
            answers = await asyncio.gather(*(many.generate(**r, model="tiny", ignore_eos=True) for r in requests))
        return [answer.text for answer in answers]

    alone = [client.generate(**r, model="tiny", ignore_eos=True).text for r in requests]
    assert asyncio.run(together()) == alone


def test_client_that_leaves_stops_the_work(client: Client) -> None:
    """Closing a stream frees its sequence within a step."""
    stream = client.stream(PROMPT, model="tiny", ignore_eos=True)
    next(iter(stream))
    stream.close()
    wait_until_idle(client)
    assert all(load.kv_cache_bytes == 0 for load in client.get_load())


async def test_cancelled_task_stops_the_work(target: str, client: Client) -> None:
    """Cancelling an asyncio task cancels the RPC, while queued, in prefill or in decode."""
    async with AsyncClient(target) as many:
        tasks = [asyncio.create_task(many.generate(PROMPT, model="tiny", ignore_eos=True, n=4)) for _ in range(6)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle, client)


def test_score_tokenize_and_detokenize(client: Client, tiny_folder: Path) -> None:
    """The other verbs agree with each other and with the model."""
    tokens = client.tokenize("hello 猫", model="tiny")
    ids = [token.id for token in tokens]
    assert client.detokenize(ids, model="tiny") == "hello 猫"
    assert b"".join(token.token for token in tokens).decode() == "hello 猫"
    score = client.score("hello 猫", model="tiny", top_logprobs=2)
    assert [item.token_id for item in score.raw_logprobs] == ids
    assert score.raw_logprobs[0].logprob is None
    assert score.total_logprob == pytest.approx(sum(item.logprob for item in score.raw_logprobs[1:]))


def test_prompt_logprobs_come_with_a_stream(client: Client) -> None:
    """The first message of a stream waits for the prompt's scores when they were asked for."""
    with client.stream(PROMPT, model="tiny", max_tokens=2, prompt_logprobs=True, logprobs="raw") as stream:
        chunks = list(stream)
        scored = [item.logprob for item in stream.prompt_info.prompt_logprobs]
    assert scored[0] is None
    assert scored[1:] == pytest.approx([item.logprob for item in client.score(PROMPT, model="tiny").raw_logprobs[1:]])
    assert sum(len(chunk.logprobs) for chunk in chunks) == 2


def test_guidance_speculation_and_best_of_over_the_wire(client: Client) -> None:
    """The engine's options travel, and a stream refuses best_of with the reason."""
    knobs = {"model": "tiny", "seed": 3, "max_tokens": 20, "ignore_eos": True, "token_ids": True}
    plain = client.generate(PROMPT * 3, **knobs)
    drafted = client.generate(PROMPT * 3, **knobs, speculation="prompt_lookup", num_draft_tokens=3)
    assert drafted.choices[0].token_ids == plain.choices[0].token_ids
    assert drafted.choices[0].finish.usage.num_draft_tokens >= drafted.choices[0].finish.usage.num_accepted_tokens
    guided = client.generate(PROMPT, **knobs, guidance_scale=3.0, negative_prompt="hello")
    assert guided.choices[0].token_ids != plain.choices[0].token_ids
    assert len(client.generate(PROMPT, **knobs, n=2, best_of=4).choices) == 2
    with pytest.raises(InvalidArgumentError, match="refused for streams"):
        list(client.stream(PROMPT, **knobs, best_of=2))
    with pytest.raises(InvalidArgumentError, match="negative_prompt"):
        client.generate(PROMPT, **knobs, guidance_scale=2.0, negative_prompt=[9999])
